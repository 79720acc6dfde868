"""The vLLM backend inside a real engine on this machine's CPU: what it answers and how many blocks it gets, against vLLM's own.

    python -m pagedkv.bench.vllm_engine --model DIR --text FILE --out rows.json

runs where vLLM is installed, which is an environment of its own (`make vllm`); the notebook calls it there and reads the rows back.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pagedkv import models
from pagedkv.bench import vllm_throughput
from pagedkv.bench.comparison import Absent
from pagedkv.bench.vllm_throughput import attention_layers
from pagedkv.evidence.root import find_root
from pagedkv.integrations.vllm import installed

# How an engine's cache is asked for, and PAGEDKV_VLLM_SCALES.
CACHES = {"stock": {}, "unquantised": {"attention_backend": "CUSTOM"}, "int8": {"attention_backend": "CUSTOM"}}
SCALES = {"unquantised": "none"}
KV_BYTES = 192 << 20
PROMPT_TOKENS = (16, 48, 96, 160, 256, 384, 512, 700)  # one prompt of each length
NEW_TOKENS = 24
_CANDIDATES = 20  # log-probabilities a step, as many as vLLM gives; the reference's token has to be among them


def engine(model: str | Path, cache: str = "int8", dtype: str = "float32", **options):
    """A `vllm.LLM` in this process. `cache`: a name in `CACHES`. Import vllm only after this module: the environment decides."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ["PAGEDKV_VLLM_SCALES"] = SCALES.get(cache, "token_head")
    from vllm import LLM

    options = {"max_model_len": 1024, "kv_cache_memory_bytes": KV_BYTES, "enforce_eager": True, **options}
    return LLM(str(model), dtype=dtype, seed=0, **{**CACHES[cache], **options})


def backend_of(llm) -> str:
    """The class that computes attention in all its layers. Raises `RuntimeError` where they differ."""
    names = {f"{(c := type(layer.impl)).__module__}.{c.__qualname__}" for layer in attention_layers(llm)}
    if len(names) != 1:
        raise RuntimeError(f"expected one attention backend, found {sorted(names)}")
    return names.pop()


def blocks_of(llm) -> int:
    """The blocks that the engine reports."""
    return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


def prompts_of(llm, text: str, lengths: tuple[int, ...] = PROMPT_TOKENS) -> list[list[int]]:
    """Token ids: stretches of a text that do not overlap."""
    ids = llm.get_tokenizer()(text[: 20 * sum(lengths)], add_special_tokens=False)["input_ids"]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@dataclasses.dataclass
class Answer:
    tokens: list[int]
    logprobs: list[dict[int, float]]  # of each step's candidates


def greedy(llm, prompts: list[list[int]], new_tokens: int | list[int] = NEW_TOKENS) -> list[Answer]:
    """The engine's greedy continuation of each prompt, all in one call."""
    from vllm import SamplingParams

    counts = new_tokens if isinstance(new_tokens, list) else [new_tokens] * len(prompts)
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=_CANDIDATES) for n in counts]
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [answer(result) for result in results]


def answer(result) -> Answer:
    """Of a `vllm.RequestOutput`."""
    output = result.outputs[0]
    return Answer(list(output.token_ids), [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs])


def logprob_deltas(llm, prompts: list[list[int]], reference: list[Answer]) -> list[float]:
    """How far `llm` is from the reference in the log-probability of each of the reference's tokens, after the same tokens.

    Where the two would continue differently, `llm` starts again from the reference's text, so every token is compared.
    """
    deltas: list[float] = []
    done = [0] * len(prompts)
    while left := [i for i, answer in enumerate(reference) if done[i] < len(answer.tokens)]:
        texts = [prompts[i] + reference[i].tokens[: done[i]] for i in left]
        answers = greedy(llm, texts, [len(reference[i].tokens) - done[i] for i in left])
        for i, answer in zip(left, answers, strict=True):
            for token, candidates in zip(answer.tokens, answer.logprobs, strict=True):
                wanted, theirs = reference[i].tokens[done[i]], reference[i].logprobs[done[i]]
                deltas.append(candidates[wanted] - theirs[wanted])
                done[i] += 1
                if token != wanted:
                    break
    return deltas


def rows(model: Path, text: str) -> list[dict]:
    """What the notebook records. One engine after the other: no two are in memory at once."""
    found = []

    def started(cache: str, dtype: str):
        llm = engine(model, cache, dtype)
        found.append(
            {
                "kind": "engine",
                "cache": cache,
                "dtype": dtype,
                "vllm": installed(),
                "backend": backend_of(llm),
                "head_dim": attention_layers(llm)[0].head_size,
                "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
                "kv_bytes": KV_BYTES,
                "blocks": blocks_of(llm),
            }
        )
        return llm

    llm = started("stock", "float32")
    prompts = prompts_of(llm, text)
    reference = greedy(llm, prompts)
    for cache in ("unquantised", "int8"):
        del llm
        gc.collect()
        llm = started(cache, "float32")
        answers = greedy(llm, prompts)
        pairs = [(a, b) for x, y in zip(answers, reference, strict=True) for a, b in zip(x.tokens, y.tokens, strict=True)]
        deltas = [abs(d) for d in logprob_deltas(llm, prompts, reference)]
        found.append(
            {
                "kind": "answers",
                "cache": cache,
                "tokens": len(pairs),
                "share_equal": sum(a == b for a, b in pairs) / len(pairs),
                "compared": len(deltas),
                "max_delta_logprob": max(deltas),
                "mean_delta_logprob": sum(deltas) / len(deltas),
            }
        )
    del llm
    gc.collect()
    started("stock", "bfloat16")
    blocks = {(row["cache"], row["dtype"]): row["blocks"] for row in found if row["kind"] == "engine"}
    found.append({"kind": "blocks", "head_dim": 64, "ratio": blocks["int8", "float32"] / blocks["stock", "bfloat16"]})
    return found


# ------------------------------------------------------------------------------------------- from outside


def interpreter(device: str) -> Path:
    """The Python that has vLLM: on the CPU that of `make vllm`, else this one. Raises `Absent`."""
    own = find_root() / "build" / "vllm" / "bin" / "python"
    if device == "cpu" and own.is_file():
        return own
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    get = "make vllm, then snakemake --cores 1 vllm --forcerun engine" if device == "cpu" else "pip install vllm==0.26.0"
    raise Absent(f"vLLM is not installed: {get}")


def elsewhere(device: str, folder: Path, points: list[str], sources: Mapping[str, str]) -> list[dict]:
    """What the notebook records, measured in processes of `interpreter`: `rows`, or on cuda those of `vllm_throughput`.

    `folder` holds the model and the rows on their way here; `points` as there. PAGEDKV_VLLM_SECONDS in the environment limits a run on
    cuda; what is left out is a row that says so, and measured by the next run, unless `sources` (path: sha256) are others by then.

    Raises:
        Absent: no vLLM, or no model. RuntimeError: the run failed; the message ends with what it said last.
    """
    python = interpreter(device)
    if device == "cuda":
        seconds = os.environ.get("PAGEDKV_VLLM_SECONDS")
        folder = folder / f"cuda-{vllm_throughput.state(sources)}"
        return vllm_throughput.rows(folder, tuple(points), float(seconds) if seconds else None)
    out = folder / f"{device}.json"
    folder.mkdir(parents=True, exist_ok=True)
    downloads = find_root() / "build" / "downloads"
    # The engine's own transformers writes the model that the engine reads: this environment's may be too old to write GGUF as floats.
    command = [str(python), "-m", "pagedkv.models", "--safetensors", "--out", str(folder), "--assets", str(downloads)]
    done = subprocess.run(command, cwd=find_root(), capture_output=True, text=True)
    if done.returncode != 0:
        raise Absent((done.stderr or done.stdout).strip().splitlines()[-1])
    model, text = folder / models.ENGINE_MODEL, downloads / models.ALICE.name
    command = [str(python), "-m", "pagedkv.bench.vllm_engine", "--model", str(model), "--text", str(text), "--out", str(out)]
    done = subprocess.run(command, cwd=find_root(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:3])} failed:\n{done.stderr[-2000:]}")
    return json.loads(out.read_text())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.bench.vllm_engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with safetensors")
    parser.add_argument("--text", type=Path, required=True, help="where the prompts come from")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.out.write_text(json.dumps(rows(options.model, options.text.read_text(encoding="utf-8")), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
