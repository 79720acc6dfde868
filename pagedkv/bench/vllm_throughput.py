"""Decode throughput of vLLM on a GPU with this project's backend and with vLLM's own caches, and the kernel alone against vLLM's INT8.

    python -m pagedkv.bench.vllm_throughput --folder build/engine

Each engine has a process of its own and the GPU to itself, at the same memory limit. Models have dummy weights: what is measured depends on
shapes, not on what is said. Rows go to a file as they come: a run that is killed, or given too little time, is taken up by the next, which
takes what is missing in the order of `MODELS`, then of the points, then of `CACHES`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pagedkv.bench import child
from pagedkv.evidence.root import find_root

# What each cache asks vLLM for. In this order they run: should the time not suffice, the slowest of vLLM's own is left out.
CACHES = {
    "pagedkv_int8": {"attention_backend": "CUSTOM", "kv_cache_dtype": "int8_per_token_head"},
    "vllm_fp8": {"kv_cache_dtype": "fp8"},
    "vllm_bf16": {"kv_cache_dtype": "auto"},
    "vllm_int8": {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "int8_per_token_head"},
}
POINTS = ("maxx32768", "32x8192", "32x4096")  # requests (max: as many as fit) and tokens of context each
KERNEL_SHAPES = ("256x4096", "32x8192")
MEMORY = 0.85  # of the GPU's, for weights and cache
MAX_REQUESTS = 128
# Batches that a CUDA graph is captured for, by every engine alike: those of `POINTS`, and 8 apart, as vLLM's own, where as many as fit
# will be. A graph costs time when the engine starts, and vLLM by itself would make twice as many.
GRAPHS = (1, 2, *range(24, 65, 8), MAX_REQUESTS)
DECODE_STEPS = 64
_WARM_STEPS = 4
_SLACK = 512  # new tokens a request may make while the last prompts are still being read
_ENGINE_S = 110  # what an engine takes to start and to measure its first point: kept for those to come where time is limited

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Shapes of published models, with room for 32k tokens.
MODELS = {
    "llama-3-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}


class OutOfTime(Exception):
    """The seconds given to this process are over."""


# ------------------------------------------------------------------------------------------------------ one engine


def import_vllm():
    """vLLM, set to run in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    import vllm

    return vllm


def engine(model: str, cache: str, folder: Path, max_model_len: int):
    """A `vllm.LLM` of that shape with one of `CACHES`; CUDA graphs and compilation as vLLM sets them, for batches of `GRAPHS`."""
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return import_vllm().LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=MAX_REQUESTS,
        gpu_memory_utilization=MEMORY,
        enable_prefix_caching=False,
        enable_flashinfer_autotune=False,  # of operators that no engine here uses
        compilation_config={"cudagraph_capture_sizes": list(GRAPHS)},
        seed=0,
        **CACHES[cache],
    )


def decode(llm, requests: int, context: int, steps: int = DECODE_STEPS, deadline: float = float("inf"), attend: bool = True) -> dict:
    """Read `requests` prompts of `context` tokens, then time steps in which all of them make a token.

    `attend`: whether the prompts' tokens attend to those before them. Without, their K and V are computed and written all the same, so
    decode reads as much from as many pages; what is left out is the part that grows with the square of the context.

    Returns `{prompts_attend, prefill_s, step_ms, tokens_per_s}`: until every prompt is read, None where it was not read in full; the mean
    step; requests over it.

    Raises:
        OutOfTime: `deadline`, of `time.monotonic`, came first. RuntimeError: the cache does not hold them all at once.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=_SLACK + _WARM_STEPS + steps, ignore_eos=True, detokenize=False)
    core = llm.llm_engine
    names = [f"{requests}x{context}-{i}" for i in range(requests)]
    prompts = [[3 + (7919 * i + 104729 * t) % 49000 for t in range(context)] for i in range(requests)]

    def step() -> list:
        results = core.step()
        if time.monotonic() > deadline:
            raise OutOfTime
        return results

    try:
        begun = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            core.add_request(name, {"prompt_token_ids": prompt}, sampling)
        answering: set[str] = set()
        with contextlib.nullcontext() if attend else _without_attention(llm):
            while len(answering) < requests:
                for result in step():
                    answering.add(result.request_id)
                    if result.finished:
                        raise RuntimeError(f"{result.request_id} ended before all prompts were read: raise _SLACK")
        prefill_s = time.perf_counter() - begun
        _make_tokens(step, requests, _WARM_STEPS)
        decode_s = _make_tokens(step, requests, steps)
    finally:
        core.abort_request(names)
        while core.has_unfinished_requests():
            core.step()
    speed = {"step_ms": 1e3 * decode_s / steps, "tokens_per_s": requests * steps / decode_s}
    return {"prompts_attend": attend, "prefill_s": prefill_s if attend else None, **speed}


def _make_tokens(step, requests: int, tokens: int) -> float:
    """Seconds in which every request makes so many. An engine that runs ahead answers with what the step before made, or nothing."""
    begun, made = time.perf_counter(), 0
    while made < tokens:
        if results := len(step()):
            if results != requests:
                raise RuntimeError(f"{results} of {requests} requests made a token: the cache does not hold them all")
            made += 1
    return time.perf_counter() - begun


@contextlib.contextmanager
def _without_attention(llm) -> Iterator[None]:
    """Attention gives zeros. A step of single tokens is not concerned: it replays a graph that was captured before."""

    def zeros(layer, query, key, value, kv_cache, attn_metadata, output, **_):
        return output.zero_()

    implementations = [layer.impl for layer in attention_layers(llm)]
    for implementation in implementations:
        implementation.forward = zeros
    try:
        yield
    finally:
        for implementation in implementations:
            del implementation.forward


def engine_rows(model: str, cache: str, points: list[str], emit, deadline: float) -> None:
    """One engine, every point; each row goes to `emit`."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        pairs = [(requests, int(context)) for requests, _, context in (point.rpartition("x") for point in points)]
        llm = engine(model, cache, Path(folder), max(context for _, context in pairs) + _SLACK + _WARM_STEPS + DECODE_STEPS)
        started = time.monotonic() - begun
        config = llm.llm_engine.vllm_config
        capacity = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        decode(llm, 2, 64, steps=4)  # what is compiled at first use, is compiled here
        for point, (wanted, context) in zip(points, pairs, strict=True):
            held = capacity // (context + _SLACK + _WARM_STEPS + DECODE_STEPS)
            fits = min(held, MAX_REQUESTS)
            requests = fits if wanted == "max" else int(wanted)
            row = {
                "kind": "engine",
                "model": model,
                "cache": cache,
                "point": point,
                "backend": _backend(llm),
                "cuda_graphs": config.compilation_config.cudagraph_mode.name,  # what the backend allows of what vLLM wants
                "start_s": started,
                "kv_tokens": capacity,
                "requests": requests,
                "context": context,
                "largest": wanted == "max" and fits == held,  # a small model's cache holds more than are asked to run
            }
            if requests > fits:
                emit({**row, "status": "absent", "reason": f"{fits} requests fit"})
                continue
            try:
                # As many as fit, and long: vLLM's INT8 alone would read such prompts for seven minutes. Other points tell of prefill.
                emit({**row, "status": "measured", **decode(llm, requests, context, deadline=deadline, attend=wanted != "max")})
            except OutOfTime:
                emit({**row, "status": "absent", "reason": "no time was left"})


def attention_layers(llm) -> list:
    """Of an engine in this process."""
    from vllm.model_executor.layers.attention import Attention

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, Attention)]


def _backend(llm) -> str:
    (name,) = {type(layer.impl).__qualname__ for layer in attention_layers(llm)}
    return name


# ------------------------------------------------------------------------------------------------ the kernel alone


def kernel_rows(emit, shapes: tuple[str, ...] = KERNEL_SHAPES) -> None:
    """Decode attention over INT8 with a scale for each token and head, each in the pages that it has inside vLLM."""
    import torch

    import pagedkv
    from pagedkv.bench.inputs import PagedInputs, shape
    from pagedkv.evidence.timing import measure
    from pagedkv.integrations.vllm.pages import SCALE_BYTES, Pages

    for name in shapes:
        inputs = PagedInputs(shape(name), torch.device("cuda"))
        cache = inputs.cache("int8_token_head")
        blocks, size, heads, dim = cache[0].shape
        buffer = torch.empty(blocks, size, heads, 2 * (dim + SCALE_BYTES), dtype=torch.int8, device="cuda")
        pages = Pages.view(buffer, size, heads, dim, in_kernel=True)
        planes = pages.k, pages.k_scale, pages.v, pages.v_scale
        for plane, values in zip(planes, cache, strict=True):
            plane.copy_(values)

        def ours(rotated, inputs=inputs, planes=planes):
            return [
                lambda q=q, table=table: pagedkv.quant_paged_attention(q, *planes, table, inputs.seq_lens, inputs.sm_scale, rotated=rotated)
                for q, table in zip(inputs.queries, inputs.block_tables, strict=True)
            ]

        theirs, output = _triton_int8(inputs, cache)
        theirs[0]()
        torch.testing.assert_close(output, ours(False)[0](), rtol=0.02, atol=2e-3)  # both right, or there is nothing to compare
        for who, calls in (("pagedkv", ours(True)), ("pagedkv, not rotated", ours(False)), ("vllm_triton", theirs)):
            timed = measure(device="cuda", rotate=calls, budget_s=0.3)
            emit({"kind": "kernel", "shape": name, "implementation": who, "status": "measured", **timed})


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


@dataclasses.dataclass(frozen=True)
class Part:
    """What one process measures: the kernel alone, or a model with a cache."""

    model: str | None = None
    cache: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model}.{self.cache}" if self.model else "kernel"

    def wanted(self, points: tuple[str, ...]) -> list[dict]:
        """What tells its rows apart, the most important first."""
        if self.model is None:
            return [
                {"kind": "kernel", "shape": shape, "implementation": who} for shape in KERNEL_SHAPES for who in ("pagedkv", "vllm_triton")
            ]
        return [{"kind": "engine", "model": self.model, "cache": self.cache, "point": point} for point in points]

    def missing(self, folder: Path, points: tuple[str, ...]) -> list[dict]:
        """Those of `wanted` that were not measured yet."""
        return [wanted for wanted in self.wanted(points) if not _find(read(folder), status="measured", **wanted)]


PARTS = (Part(), *(Part(model, cache) for model in MODELS for cache in CACHES))


def rows(folder: Path, points: tuple[str, ...] = POINTS, seconds: float | None = None) -> list[dict]:
    """Every row that is not yet in `folder`, each part in a process of its own, and then all there is. What fails is a row that says so.

    `folder`: rows, logs, and beside it what engines compile, which the next find. `seconds`: for all of them; None: whatever they take.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    todo = _todo(folder, points)
    with contextlib.ExitStack() as waiting:
        processes = [waiting.enter_context(Process(todo[0], folder))] if todo else []
        for i, part in enumerate(todo):
            if i + 1 < len(todo):  # imports vLLM meanwhile
                processes.append(waiting.enter_context(Process(todo[i + 1], folder)))
            to_come = sum(later.model == (part.model or next(iter(MODELS))) for later in todo[i + 1 :])
            left = end - time.monotonic()
            reason = "no time was left"
            missing = part.missing(folder, points)
            if left > _ENGINE_S / 2:
                # What comes later can wait for another run; what this one is about is its first point.
                allowed = max(min(left, _ENGINE_S), left - _ENGINE_S * to_come)
                reason = processes[i].run([wanted["point"] for wanted in missing if "point" in wanted], allowed)
            for wanted in missing:
                if not _find(read(folder), **wanted):
                    append(folder, {**wanted, "status": "absent", "reason": reason})
    found = [row for part in PARTS for wanted in part.wanted(points) for row in _find(read(folder), **wanted)]
    extra = [row for row in read(folder) if row["kind"] == "kernel" and row not in found]
    return found + extra + derived(found)


def _todo(folder: Path, points: tuple[str, ...]) -> list[Part]:
    """Parts with rows missing: a model's engines in the order of their most important one."""

    def urgency(part: Part) -> tuple[int, int]:
        if part.model is None:
            return -1, 0
        return list(MODELS).index(part.model), points.index(part.missing(folder, points)[0]["point"])

    return sorted((part for part in PARTS if part.missing(folder, points)), key=urgency)


class Process:
    """A part in a process of its own. It imports what it needs, which takes as long as a measurement, and waits to be told to begin."""

    def __init__(self, part: Part, folder: Path):
        self._log = folder / f"{part.name}.log"
        compiled = folder.parent / "compiled"
        caches = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        environment = child.environment(**{variable: str(compiled / name) for variable, name in caches.items()})
        command = child.command("pagedkv.bench.vllm_throughput", "--folder", folder, "--part", part.name)
        with self._log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, cwd=find_root(), env=environment, text=True
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def run(self, points: list[str], seconds: float) -> str:
        """Begin, and wait for the end; returns why rows may be missing then."""
        try:
            # Between two steps a process sees by itself that its time is over; one that hangs does not.
            told = json.dumps({"points": points, "seconds": None if seconds == float("inf") else seconds}) + "\n"
            self._process.communicate(told, timeout=None if seconds == float("inf") else seconds + 15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "no time was left"
        said = [
            line
            for line in self._log.read_text(errors="replace").splitlines()
            if re.match(r"(\[.*?\] )?[\w.]*(Error|Exception|Absent|Refused)\b", line)
        ]
        return said[-1][:300] if said else f"exit status {self._process.returncode}"


def derived(found: list[dict]) -> list[dict]:
    """The ratios that are claimed, where both sides were measured."""
    made = []

    def ratio(quantity: str, ours: list[dict], peers: list[dict], field: str, better: str) -> None:
        ours, peers = ([row for row in side if row.get("status") == "measured" and row[field] is not None] for side in (ours, peers))
        if ours and peers:
            best = (max if better == "more" else min)(peers, key=lambda row: row[field])
            mine, theirs = ours[0][field], best[field]
            what = {name: ours[0][name] for name in ("model", "point", "shape") if name in ours[0]}
            value = theirs / mine if quantity.startswith("kernel") else mine / theirs
            named = [row.get("cache", row.get("implementation")) for row in peers]
            made.append(
                {
                    "kind": "derived",
                    "quantity": quantity,
                    **what,
                    "value": value,
                    "peer": best.get("cache", best.get("implementation")),
                    "peers": named,
                }
            )

    for shape in KERNEL_SHAPES:
        sides = (_find(found, kind="kernel", shape=shape, implementation=who) for who in ("pagedkv", "vllm_triton"))
        ratio("kernel_vs_vllm_int8", *sides, "p50_us", "less")
    for model in MODELS:
        for point in dict.fromkeys(row["point"] for row in found if row.get("model") == model):
            at = {cache: _find(found, model=model, point=point, cache=cache) for cache in CACHES}
            ours = at.pop("pagedkv_int8")
            ratio("decode_vs_vllm_int8", ours, at["vllm_int8"], "tokens_per_s", "more")
            ratio("prefill_time_vs_bf16", ours, at["vllm_bf16"], "prefill_s", "less")
            if all(row["status"] == "measured" for cache in ("vllm_bf16", "vllm_fp8") for row in at[cache]):  # INT8 is behind both
                ratio("decode_vs_best_of_vllm", ours, [row for side in at.values() for row in side], "tokens_per_s", "more")
    return made


def state(sources: Mapping[str, str]) -> str:
    """A name for the sources of the rows (path: sha256; what a notebook tells of them is none), the vLLM and the GPU here."""
    from pagedkv.evidence import hardware
    from pagedkv.integrations.vllm import installed

    code = sorted((path, sha) for path, sha in sources.items() if not path.startswith("notebooks/"))
    what = [code, installed(), hardware.describe("cuda")["name"]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]


def append(folder: Path, row: dict) -> None:
    """A row on a line of its own, on the disk when this returns."""
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[dict]:
    """The rows, of those about the same thing the last."""
    path = folder / "rows.jsonl"
    latest = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        latest[tuple(row.get(name) for name in ("kind", "shape", "implementation", "model", "cache", "point"))] = row
    return list(latest.values())


def _find(found: list[dict], **fields) -> list[dict]:
    return [row for row in found if all(row.get(name) == value for name, value in fields.items())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.bench.vllm_throughput", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="rows and logs; what lies there is not measured again")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="REQUESTSxCONTEXT")
    parser.add_argument("--seconds", type=float, help="leave out what would take longer")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="only this, once a line on stdin says what of it")
    options = parser.parse_args(arguments)
    if options.part is None:
        print(json.dumps(rows(options.folder, tuple(options.points), options.seconds), indent=1))
        return 0
    (part,) = (part for part in PARTS if part.name == options.part)
    import_vllm()
    told = sys.stdin.readline()
    if not told:  # not needed after all
        return 0
    told = json.loads(told)

    def emit(row: dict) -> None:
        append(options.folder, row)

    if part.model is None:
        kernel_rows(emit)
    else:
        deadline = time.monotonic() + (float("inf") if told["seconds"] is None else told["seconds"])
        engine_rows(part.model, part.cache, told["points"], emit, deadline)
        sys.stdout.flush()
        os._exit(0)  # an engine takes seconds to come down, if it does
    return 0


if __name__ == "__main__":
    sys.exit(main())
