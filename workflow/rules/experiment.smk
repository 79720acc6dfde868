# Every experiment is one notebook, run by papermill on one device: it measures, and writes a record and figures.
# None waits for `build`: whichever needs the kernels first compiles them, once, under a lock (pagedkv/ops/build.py).
# (An `ancient` input would give the order, but Snakemake then overlooks edits to the waiting job's own inputs.)


def threads_of(wildcards):
    """A timing, or what uses every core, takes all those of a local run, so that nothing runs beside it. A quick run does neither."""
    entry = EXPERIMENTS[wildcards.experiment]
    if entry.get("exclusive") and not QUICK:
        try:
            return workflow.cores
        except WorkflowError:
            pass  # a cluster: no cores of its own, and slurm_extra keeps others off the node
    return 1


def obtained(experiment, device):
    """What is fetched before an experiment runs. A quick run starts no engine, and one for a GPU has to be there."""
    entry = EXPERIMENTS[experiment]
    engine = rules.engine.output if entry.get("engine") and device == "cpu" and not QUICK else []
    return [*(rules.model.output if entry.get("model") else []), *engine]


rule experiment:
    input:
        sources=lambda w: sources(w.experiment, w.device),
        reads=lambda w: reads(w.experiment, w.device),
        model=lambda w: obtained(w.experiment, w.device),
    output:
        record=f"{ROOT}/evidence/{{device}}/{{experiment}}.json",
        figures=directory(f"{ROOT}/evidence/{{device}}/figures/{{experiment}}"),
    log:
        notebook=f"{ROOT}/notebooks/{{device}}/{{experiment}}.ipynb",
    params:
        quick=QUICK,
    threads: threads_of
    resources:
        mem_mb=lambda w: EXPERIMENTS[w.experiment].get("mem_mb", 2000),
        runtime=lambda w: EXPERIMENTS[w.experiment].get("runtime", 30),
        gpu=lambda w: int(w.device == "cuda"),
        benchmark=lambda w: int(EXPERIMENTS[w.experiment].get("exclusive", False) and not QUICK),
        slurm_extra=lambda w: "'--exclusive'" if EXPERIMENTS[w.experiment].get("exclusive") else "",
    script:
        "../scripts/run_notebook.py"


# Targets: build, validate, benchmark, quality, summary, and each experiment by its name.
for target, members in TARGETS.items():

    rule:
        name:
            target
        input:
            records(members),


rule figures:
    input:
        figure_folders(),
