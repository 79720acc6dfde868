# What the evidence says: a page with every figure and row, and each claim of workflow/claims.yaml held against its record.


rule report:
    input:
        records=records(),
        figures=figure_folders(),
        claims="workflow/claims.yaml",
    output:
        html=f"{ROOT}/report/index.html",
        markdown=f"{ROOT}/report/index.md",
    resources:
        mem_mb=1000,
        runtime=5,
    shell:
        "{sys.executable} -m pagedkv.evidence.report --out {output.html} {input.records}"


rule verify:
    input:
        [] if QUICK else rules.publish.output,
    shell:
        "{sys.executable} -m pagedkv.cli verify"


onsuccess:
    if Path(rules.report.output.html).exists():
        print(f"every figure and claim on a page: {rules.report.output.html}", file=sys.stderr)
