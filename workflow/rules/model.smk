# A real model's KV cache over a real text. Where it cannot be had (no network, an unreadable file), status.json
# says why, and what depends on it reports the absence; `snakemake model --forcerun model` tries again.


rule model:
    output:
        f"{ROOT}/model/status.json",
    log:
        f"{ROOT}/model/log.txt",
    params:
        model=config["model"]["name"],
        text=config["model"]["text"],
        tokens=256 if QUICK else config["model"]["tokens"],
    threads: 2
    resources:
        mem_mb=4000,
        runtime=30,
    script:
        "../scripts/obtain_model.py"
