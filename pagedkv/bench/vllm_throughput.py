"""Decode throughput of vLLM on a GPU with this project's backend and with vLLM's own caches, and the kernel alone against vLLM's INT8.

    python -m pagedkv.bench.vllm_throughput --out rows.json

takes each cache in a process of its own, which has the GPU to itself. The model has the shape of Llama-3-8B and dummy weights: what is
measured depends on shapes, not on what is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What each cache asks vLLM for.
CACHES = {
    "pagedkv_int8": {"attention_backend": "CUSTOM", "kv_cache_dtype": "int8_per_token_head"},
    "vllm_bf16": {"kv_cache_dtype": "auto"},
    "vllm_fp8": {"kv_cache_dtype": "fp8"},
    "vllm_int8": {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "int8_per_token_head"},
}
POINTS = ("32x4096", "32x8192", "maxx32768")  # requests (max: as many as fit) and tokens of context each
MEMORY = 0.85  # of the GPU's, for weights and cache
DECODE_STEPS = 48
_SLACK = 256  # new tokens a request may make while the last prompts are still being read
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def engine(cache: str, folder: Path, max_model_len: int):
    """A `vllm.LLM` of that shape with one of `CACHES`, CUDA graphs and compilation as vLLM sets them."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max_model_len,
        gpu_memory_utilization=MEMORY,
        enable_prefix_caching=False,
        seed=0,
        **CACHES[cache],
    )


def decode(llm, requests: int, context: int, steps: int = DECODE_STEPS) -> dict:
    """Read `requests` prompts of `context` tokens, then time steps in which all of them make a token.

    Returns `{prefill_s, step_ms, tokens_per_s}`: until every prompt is read; the median step; requests over the mean step.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=_SLACK + steps, ignore_eos=True, detokenize=False)
    core = llm.llm_engine
    for i in range(requests):
        prompt = [3 + (7919 * i + 104729 * t) % 100000 for t in range(context)]
        core.add_request(f"{requests}x{context}-{i}", {"prompt_token_ids": prompt}, sampling)
    begun = time.perf_counter()
    answering: set[str] = set()
    while len(answering) < requests:
        for result in core.step():
            answering.add(result.request_id)
            if result.finished:
                raise RuntimeError(f"{result.request_id} ended before all prompts were read: raise _SLACK")
    prefill_s = time.perf_counter() - begun
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        made = len(core.step())
        times.append(time.perf_counter() - start)
        if made != requests:
            raise RuntimeError(f"{made} of {requests} requests made a token: the cache does not hold them all")
    core.abort_request([f"{requests}x{context}-{i}" for i in range(requests)])
    while core.has_unfinished_requests():
        core.step()
    return {
        "prefill_s": prefill_s,
        "step_ms": 1e3 * statistics.median(times),
        "tokens_per_s": requests / statistics.fmean(times),
    }


def engine_rows(cache: str, points: tuple[str, ...] = POINTS) -> list[dict]:
    """One engine, every point."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(requests, int(context)) for requests, _, context in (point.rpartition("x") for point in points)]
        longest = max(context for _, context in pairs)
        llm = engine(cache, Path(folder), longest + _SLACK + DECODE_STEPS)
        config = llm.llm_engine.vllm_config
        capacity = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        backend = _backend(llm)
        found = []
        for wanted, context in pairs:
            fits = min(capacity // (context + _SLACK + DECODE_STEPS), config.scheduler_config.max_num_seqs)
            requests = fits if wanted == "max" else int(wanted)
            row = {
                "kind": "engine",
                "cache": cache,
                "backend": backend,
                "kv_tokens": capacity,
                "requests": requests,
                "context": context,
                "largest": wanted == "max",
            }
            if requests > fits:
                found.append({**row, "status": "absent", "reason": f"{fits} requests fit"})
                continue
            decode(llm, min(2, requests), 64, steps=4)  # compilation and autotuning end here
            found.append({**row, "status": "measured", **decode(llm, requests, context)})
        return found


def _backend(llm) -> str:
    from vllm.model_executor.layers.attention import Attention

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    (name,) = {type(layer.impl).__qualname__ for layer in layers if isinstance(layer, Attention)}
    return name


# ------------------------------------------------------------------------------------------------ the kernel alone


def kernel_rows(name: str = "256x4096") -> list[dict]:
    """Decode attention over INT8 with a scale for each token and head: `quant_paged_attention`, and vLLM's in the layout that it ships."""
    import torch

    import pagedkv
    from pagedkv.bench.inputs import PagedInputs, shape
    from pagedkv.evidence.timing import measure

    inputs = PagedInputs(shape(name), torch.device("cuda"))
    cache = inputs.cache("int8_token_head")
    theirs, output = _triton_int8(inputs, cache)

    def ours(q, table):
        return lambda: pagedkv.quant_paged_attention(q, *cache, table, inputs.seq_lens, inputs.sm_scale)

    calls = [ours(q, table) for q, table in zip(inputs.queries, inputs.block_tables, strict=True)]
    theirs[0]()
    torch.testing.assert_close(output, calls[0](), rtol=0.02, atol=2e-3)  # both right, or there is nothing to compare
    rows = []
    for who, timed in (("pagedkv", calls), ("vllm_triton", theirs)):
        rows.append({"kind": "kernel", "shape": name, "implementation": who, **measure(device="cuda", rotate=timed, budget_s=0.3)})
    return rows


def _triton_int8(inputs, cache) -> tuple[list, object]:
    """vLLM's decode attention, a call for each rotation, and what they write. Its pages: `[K | scale | V | scale]` a token and head."""
    import torch
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    k, k_scale, v, v_scale = cache
    dim, heads, kv_heads, seqs = inputs.shape.head_dim, inputs.shape.num_heads, inputs.shape.num_kv_heads, inputs.shape.num_seqs
    side = dim + 4
    pages = torch.empty(*k.shape[:3], 2 * side, dtype=torch.int8, device=k.device)
    pages[..., :dim], pages[..., side : side + dim] = k, v
    words = pages.view(torch.float32)
    scales = words[..., dim // 4], words[..., (side + dim) // 4]
    scales[0].copy_(k_scale)
    scales[1].copy_(v_scale)
    out = torch.empty_like(inputs.queries[0])
    segments, few = 16, 128 // kv_heads  # as TritonAttentionMetadataBuilder sets them
    partial = (few, heads, segments)
    scratch = {
        "softmax_segm_output": torch.empty(*partial, dim, device=k.device),
        "softmax_segm_max": torch.empty(partial, device=k.device),
        "softmax_segm_expsum": torch.empty(partial, device=k.device),
    }
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=k.device)

    def call(q, table):
        return lambda: unified_attention(
            q=q,
            k=pages[..., :side],
            v=pages[..., side:],
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=max(inputs.shape.seq_lens),
            softmax_scale=inputs.sm_scale,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=few,
            num_par_softmax_segments=segments,
            **scratch,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
            k_scale_cache=scales[0],
            v_scale_cache=scales[1],
        )

    return [call(q, table) for q, table in zip(inputs.queries, inputs.block_tables, strict=True)], out


# ----------------------------------------------------------------------------------------------------- all of it


def rows(points: tuple[str, ...] = POINTS) -> list[dict]:
    """Every cache and the kernel, each in a process of its own. What fails is a row that says so."""
    found = []
    for part in (*CACHES, "kernel"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "pagedkv.bench.vllm_throughput", "--part", part, "--out", str(out), "--points", *points]
            done = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            if done.returncode == 0:
                found += json.loads(out.read_text())
            else:
                reason = ([*done.stderr.strip().splitlines()] or [f"exit status {done.returncode}"])[-1][:300]
                found.append({"kind": "kernel" if part == "kernel" else "engine", "cache": part, "status": "absent", "reason": reason})
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.bench.vllm_throughput", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=(*CACHES, "kernel"), help="only this, in this process (default: all)")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="REQUESTSxCONTEXT")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.part is None:
        found = rows(tuple(options.points))
    else:
        found = kernel_rows() if options.part == "kernel" else engine_rows(options.part, tuple(options.points))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
