"""Time decode attention: this project's ops and their peers, shape by shape, against the roof of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedkv.bench.attention_peers import IMPLEMENTATIONS
from pagedkv.bench.bandwidth import gather_roof, read_gb_per_s
from pagedkv.bench.comparison import MODES, CacheImplementation, compare, ratio, rel_error
from pagedkv.bench.inputs import PagedInputs, Shape, shape
from pagedkv.evidence.timing import measure

# By what is asked of them; as `inputs.shape` reads them. Published shapes first; what is long needs a GPU to end today.
QUESTIONS = {
    "cpu": {"length": ("8x512", "32x1024", "64x2048")},
    "cuda": {
        "length": ("8x512", "32x1024", "64x2048", "64x8192", "256x4096", "1x32768", "1x131072", "8x131072"),
        "ragged": ("ragged_64x8192", "ragged_256x4096", "skewed_64x100000"),
        "heads": ("64x4096_kv32", "64x4096_kv4", "64x4096_d64", "64x4096_d256"),  # MHA, 8 query heads to a KV head
    },
}
SHAPES = {device: tuple(name for names in questions.values() for name in names) for device, questions in QUESTIONS.items()}
QUICK_SHAPES = ("2x128", "8x512")

# Before it is timed an output has to agree with plain float32 attention; 8-bit floats keep 3 bits of mantissa.
_MAX_REL_ERROR = {"float8_e4m3fn": 0.1}
_CHECKED_SEQS = 2

_BUDGET_S = {"cpu": 0.5, "cuda": 0.12}  # of timing, for each implementation, shape and mode


def expected(inputs: PagedInputs, num_seqs: int) -> Tensor:
    """Attention of the first sequences of rotation 0 in plain float32, `[num_seqs, num_heads, head_dim]`."""
    s, (k_pool, k_scale, v_pool, v_scale) = inputs.shape, inputs.cache("int8_block_head")
    outputs = []
    for q, table, n in zip(inputs.queries[0][:num_seqs].float(), inputs.block_tables[0].long(), s.seq_lens, strict=False):
        blocks = table[: -(-n // s.block_size)]
        k, v = (
            (pool[blocks].float() * scale[blocks][:, None, :, None]).flatten(0, 1)[:n].transpose(0, 1)
            for pool, scale in ((k_pool, k_scale), (v_pool, v_scale))
        )
        logits = torch.matmul(q.view(s.num_kv_heads, -1, s.head_dim), k.transpose(1, 2)) * inputs.sm_scale
        outputs.append(torch.matmul(logits.softmax(-1), v).flatten(0, 1))
    return torch.stack(outputs)


def shape_rows(
    name: str, device: torch.device, bandwidth: list[dict], *, modes: tuple[str, ...] | None = None, budget_s: float | None = None
) -> Iterator[dict]:
    """Measure every implementation on one shape.

    Args:
        name: as `inputs.shape` reads it.
        bandwidth: `bandwidth_rows` of the same run: the roof where no gather kernel exists.
        modes: timing modes; default `MODES` of the device.
        budget_s: seconds of timing for each row; default `_BUDGET_S` of the device.

    Yields:
        A row for each implementation and mode: `kind` "attention", `shape`, `implementation`, `kv_dtype`, `status`
        ("measured", or "absent" with a `reason`), `mode`, `p10_us`, `p50_us`, `p90_us`, `repeats`, `bytes` of K, V and
        scales, `gb_per_s`, `roof`, `roof_us` and `roof_fraction` (`roof_us` over `p50_us`), `rel_error` against float32.

    Raises:
        AssertionError: an output of this project is wrong. A peer's wrong output makes it absent.
    """
    modes = modes or MODES[device.type]
    budget_s = budget_s or _BUDGET_S[device.type]
    inputs = PagedInputs(shape(name), device)
    want = expected(inputs, min(_CHECKED_SEQS, inputs.shape.num_seqs))
    roofs = yield from _roofs(inputs, bandwidth, modes, budget_s)

    def measured(i: CacheImplementation) -> Iterator[dict]:
        calls = i.prepare(inputs, i.kv_dtype)
        error = rel_error(i.read(calls[0]()[: len(want)]), want)
        if not error <= _MAX_REL_ERROR.get(i.kv_dtype, 0.01):
            raise AssertionError(f"{i.name} ({i.kv_dtype}) on {name}: relative error {error:.3g} against float32")
        moved = inputs.shape.kv_bytes(i.kv_dtype)
        for mode in modes:
            times = measure(device=device, mode=mode, rotate=calls, budget_s=budget_s)
            roof_us = roofs[mode].us(inputs.shape, i.kv_dtype)
            yield {**times, "bytes": moved, "gb_per_s": moved / times["p50_us"] / 1e3, "roof": roofs[mode].name,
                   "roof_us": roof_us, "roof_fraction": roof_us / times["p50_us"], "rel_error": error}  # fmt: skip

    yield from compare(IMPLEMENTATIONS, device, {"kind": "attention", "shape": name}, measured, inputs.forget)


@dataclass
class _Roof:
    """Microseconds that reading K and V takes, by kv_dtype; others follow from the bytes of int8."""

    name: str
    times_us: dict[str, float]

    def us(self, shape: Shape, kv_dtype: str) -> float:
        if kv_dtype in self.times_us:
            return self.times_us[kv_dtype]
        return self.times_us["int8_block_head"] * shape.kv_bytes(kv_dtype) / shape.kv_bytes("int8_block_head")


def _roofs(inputs: PagedInputs, bandwidth: list[dict], modes: tuple[str, ...], budget_s: float) -> Iterator[dict]:
    """Yields the rows of the gather kernel; returns the roof of each mode."""
    shape = inputs.shape
    roofs = {}
    for mode in modes:
        us = shape.kv_bytes("int8_block_head") / read_gb_per_s(bandwidth, mode) / 1e3
        roofs[mode] = _Roof("read bandwidth", {"int8_block_head": us})
    for kv_dtype in ("int8_block_head", "float16"):
        calls = gather_roof(inputs, kv_dtype)
        for mode in modes if calls else ():
            times = measure(device=inputs.device, mode=mode, rotate=calls, budget_s=2 * budget_s)
            if roofs[mode].name != "paged gather":
                roofs[mode] = _Roof("paged gather", {})
            roofs[mode].times_us[kv_dtype] = times["p50_us"]
            moved = shape.kv_bytes("int8") * (2 if kv_dtype == "float16" else 1)
            yield {
                "kind": "attention",
                "shape": shape.name,
                "implementation": "paged gather, no arithmetic",
                "ours": True,
                "kv_dtype": kv_dtype,
                "status": "measured",
                **times,
                "bytes": moved,
                "gb_per_s": moved / times["p50_us"] / 1e3,
            }
    inputs.forget()
    return roofs


# ------------------------------------------------------------------------------------------- derived

# quantity: (which of this project's rows, which peers); see `comparison.ratio`.
_RATIOS = {
    "vs_fp16": ("int8_block_head", lambda r: r["kv_dtype"] in ("float16", "bfloat16")),
    "vs_fp8": ("int8_block_head", lambda r: r["kv_dtype"].startswith("float8")),
    "vs_sdpa": ("int8_block_head", lambda r: "SDPA" in r["implementation"]),
    "vs_gathered_sdpa": ("int8_block_head", lambda r: r["implementation"].startswith("gather")),
    "vs_fastest_peer": ("int8_block_head", lambda r: True),
    "fp16_vs_fp16": ("float16", lambda r: r["kv_dtype"] in ("float16", "bfloat16")),
}

COSTS = {"pagedkv, block mass": "block_mass_cost", "pagedkv, rotated": "rotation_cost"}


def derived_rows(rows: list[dict]) -> Iterator[dict]:
    """Ratios within one run, from its rows: `kind` "derived", `shape`, `mode`, `quantity`, `value`, `peer`.

    `token_head_cost`: p50 with token-head over p50 with block-head scales, beyond the ratio of their bytes. `block_mass_cost`
    and `rotation_cost`: p50 with block mass, or over a rotated cache, over p50 without, and `extra_us`. A ratio whose peers are
    all absent is a row with `status` "absent".
    """
    attention = [r for r in rows if r.get("kind") == "attention"]
    measured = [r for r in attention if r["status"] == "measured"]
    for name in dict.fromkeys(r["shape"] for r in attention):
        for mode in dict.fromkeys(r["mode"] for r in measured):
            here = [r for r in measured if (r["shape"], r["mode"]) == (name, mode)]
            ours = {r["kv_dtype"]: r for r in here if r["implementation"] == "pagedkv"}
            peers = [r | {"implementation": f"{r['implementation']} ({r['kv_dtype']})"} for r in here if not r["ours"]]
            row = {"kind": "derived", "shape": name, "mode": mode}
            for quantity, (kv_dtype, is_peer) in _RATIOS.items():
                yield row | {"quantity": quantity} | ratio(ours.get(kv_dtype), [r for r in peers if is_peer(r)])
            if {"int8_block_head", "int8_token_head"} <= ours.keys():
                block, token = ours["int8_block_head"], ours["int8_token_head"]
                cost = token["p50_us"] / block["p50_us"] / (token["bytes"] / block["bytes"])
                yield row | {"quantity": "token_head_cost", "status": "measured", "value": cost, "peer": "pagedkv (int8_block_head)"}
            for extra in (r for r in here if r["implementation"] in COSTS and r["kv_dtype"] in ours):
                bare = ours[extra["kv_dtype"]]
                cost = {"value": extra["p50_us"] / bare["p50_us"], "extra_us": extra["p50_us"] - bare["p50_us"]}
                yield row | {
                    "quantity": COSTS[extra["implementation"]],
                    "status": "measured",
                    **cost,
                    "peer": f"pagedkv ({bare['kv_dtype']})",
                }
