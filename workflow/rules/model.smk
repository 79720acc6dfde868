# A real model's KV cache over a real text. Where it cannot be had (no network), status.json says why, and what depends on
# it reports the absence; `snakemake model --forcerun model` tries again. Without a model or text that is named by its path
# the run ends: at once where a look tells, and else when the model is read.

import re


def is_path(model):
    """A hub id is `name` or `owner/name`, and nothing here is called so; all else is a path."""
    return model.endswith(".gguf") or re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model) is None or Path(model).exists()


def fault_of_model(path):
    """What a look tells; None where only reading it all would. Raises `OSError` where one cannot look."""
    if path.is_dir():
        return None if (path / "config.json").is_file() else "a folder without config.json"
    with open(path, "rb") as file:
        return None if path.suffix == ".gguf" and file.read(4) == b"GGUF" else "neither a GGUF file (.gguf) nor a folder"


def fault_of_text(path):
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"


def look_at(option, fault_of):
    try:
        fault = fault_of(Path(config[option]))
    except FileNotFoundError:
        fault = "no such file"
    except OSError as error:
        fault = error.strerror.lower()
    if fault:
        stop(f"{option}={config[option]}: {fault}")


MODEL_IS_PATH = bool(config["model"]) and is_path(config["model"])
if MODEL_IS_PATH:
    look_at("model", fault_of_model)
if config["text"]:
    look_at("text", fault_of_text)


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
        named=[f"--{option}={config[option]}" for option in ("model", "text") if config[option]] + ["--strict"] * MODEL_IS_PATH,
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
