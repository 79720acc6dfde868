# The one rule that writes outside build/: it copies this machine's records and figures to results/<hardware> and
# figures/<hardware>, where they are committed. Its only declared output is a stamp. Were the committed files
# outputs themselves, a fresh clone, in which every file is equally new, would take them for results of this machine.


rule publish:
    input:
        records=records(),
        figures=figure_folders(),
    output:
        "build/published.stamp",
    resources:
        mem_mb=1000,
        runtime=5,
    script:
        "../scripts/publish.py"
