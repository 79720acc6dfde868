# PagedKV's evidence. `snakemake --cores 1` rebuilds every record and figure that this machine can produce.
#
#   snakemake --cores 1 TARGET             a target below, or one experiment by its name in workflow/config.yaml
#       --config quick=true                the same rules on small inputs, under build/quick; publishes nothing
#       --config device=cpu|cuda|auto      what to measure (auto: the CPU, and a GPU where there is one)

from snakemake.utils import min_version

min_version("9.0")


configfile: "workflow/config.yaml"


localrules:
    publish,
    report,
    verify,


include: "workflow/rules/common.smk"  # the configuration, checked; which devices; which files


rule all:
    default_target: True
    input:
        [] if QUICK else "build/published.stamp",
        f"{ROOT}/report/index.html",


include: "workflow/rules/model.smk"  # model: a real model's KV cache -> build/model
include: "workflow/rules/experiment.smk"  # build, validate, benchmark, quality, figures: notebooks -> build/evidence
include: "workflow/rules/publish.smk"  # publish: build/evidence -> results/<hardware>, figures/<hardware>
include: "workflow/rules/report.smk"  # report, verify: what the evidence says
