# A real model's KV cache over a real text. Where it cannot be had (no network, an unreadable file), status.json
# says why, and what depends on it reports the absence; `snakemake model --forcerun model` tries again.


def transformers_version():
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


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
        # Another transformers may read what this one saved with another tokenizer, and say nothing: all of it is made again.
        transformers=transformers_version(),
    priority: 1 # five experiments wait for it, and it waits for the network
    threads: 1 if QUICK else 2
    resources:
        mem_mb=4000,
        runtime=30,
    shell:
        "rm -rf {params.folder}/kv.npz {params.folder}/float32;"
        " {sys.executable} -m pagedkv.models --out {params.folder} --assets build/downloads"
        " --tokens {params.tokens} {params.named:q} 2>&1 | tee {log}"


# vLLM, in an environment of its own (3.4 GB): what an experiment with `engine: true` calls. Where it cannot be had, the log says what stood in the
# way; `snakemake vllm --forcerun engine` tries again.


rule engine:
    output:
        "build/engine/status.json",
    log:
        "build/engine/log.txt",
    resources:
        mem_mb=4000,
        runtime=30,
    shell:
        "if make vllm PYTHON={sys.executable} >{log} 2>&1;"
        " then echo '{{\"available\": true}}' >{output};"
        " else echo '{{\"available\": false}}' >{output}; echo 'no vLLM: see {log}' >&2; fi"
