# A real model's KV cache over a real text. Where it cannot be had (no network, an unreadable file), status.json
# says why, and what depends on it reports the absence; `snakemake model --forcerun model` tries again.


rule model:
    input:
        "pagedkv/models.py",
        "pagedkv/kv_dump.py",
    output:
        f"{ROOT}/model/status.json",
    log:
        f"{ROOT}/model/log.txt",
    params:
        folder=f"{ROOT}/model",
        tokens=min(256, config["tokens"]) if QUICK else config["tokens"],
        named=[f"--{option}={config[option]}" for option in ("model", "text") if config[option]],
    threads: 2
    resources:
        mem_mb=4000,
        runtime=30,
    shell:
        "{sys.executable} -m pagedkv.models --out {params.folder} --assets build/downloads"
        " --tokens {params.tokens} {params.named:q} 2>&1 | tee {log}"
