"""What torch asks of an operator: `torch.library.opcheck` on several calls of each.

It compares the schema with what a call does to its arguments, the fake kernel with the real one, and the op under `torch.compile` with
the op alone, with shapes that may change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from pagedkv.bench.validation.attention_cases import problem
from pagedkv.bench.validation.judge import Check
from pagedkv.ops import registry

_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def examples(device: torch.device) -> dict[str, list[tuple[tuple, dict]]]:
    """Small calls of every op, positional and named arguments: formats, options, empty results."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    calls: dict[str, list[tuple[tuple, dict]]] = {name: [] for name in registry.NAMES}
    everything = {"sliding_window": 9, "logits_soft_cap": 5.0, "sinks": 2.0}
    for cache, options in itertools.product(("int8_block_head", "int8_token_head", "float16", "float32"), ({}, everything)):
        p = problem(device, torch.float32, cache, lens=(37, 0, 16), **options)
        scales = (p.k_scale, p.v_scale) if cache.startswith("int8") else None
        planes = (p.k_cache, scales[0], p.v_cache, scales[1]) if scales else (p.k_cache, p.v_cache)
        flags = {"return_lse": True, "return_block_mass": True} if options else {}
        calls[p.op].append(((p.q, *planes, p.block_tables, p.seq_lens, p.sm_scale), {**p.options, **flags}))
        paged = (p.k_cache, p.k_scale, p.block_tables, p.seq_lens)
        calls["channel_statistics"] += [] if options else [(paged, {"blocks_per_group": 2})]
        shift, gain = draw(2, 3, 2, *p.k_cache.shape[2:])
        calls["token_moments"].append((paged, {"blocks_per_group": 2, **({"shift": shift, "gain": gain} if options else {})}))
    tables, num_blocks = p.block_tables, len(p.k_cache)
    total = torch.zeros(num_blocks, dtype=torch.int64, device=device)
    calls["accumulate_block_mass"].append(((draw(*tables.shape).abs(), tables, total, 0.9), {}))
    held = torch.full((num_blocks,), 1000, dtype=torch.int32, device=device)  # never down to 0: every call returns the same
    for scores, references in ((draw(num_blocks), held), (draw(*tables.shape), None)):
        options = {"budget": 2, "block_size": 16, "references": references}
        calls["select_per_sequence"].append(((scores, tables, p.seq_lens), options))

    state = draw(3, 2, 8), draw(3, 2)
    calls["merge_attention_states"].append(((*state, *state), {}))
    kv, new, slots = draw(3, 5, 2, 24), draw(5, 2, 24), torch.tensor([0, 1, 9, -1, 2], device=device)
    for granularity, rotated in itertools.product(("block_head", "token_head"), (False, True)):
        calls["quantize_kv"].append(((kv, granularity), {"rotated": rotated}))
        q, scale = torch.ops.pagedkv.quantize_kv(kv, granularity)
        calls["dequantize_kv"].append(((q, scale), {}))
        calls["reshape_and_cache"].append(((new, new * 2, q, scale, q.clone(), scale.clone(), slots), {"rotated": rotated}))

    statistics = (*draw(2, 20).abs(), draw(20, 16).abs(), draw(20, 16) > 0)
    calls["eviction_scores"].append((statistics, {}))
    for k in (0, 7, 20):
        calls["select_eviction_candidates"].append(((statistics[0], k), {}))
        calls["evict_blocks"].append(((*statistics, k), {}))
    return calls


def checks(device: torch.device, quick: bool) -> Iterator[Check]:
    """A check for each call and each of opcheck's tests."""
    for op, calls in examples(device).items():
        for number, (arguments, options) in enumerate(calls[:1] if quick else calls):
            found = torch.library.opcheck(
                getattr(torch.ops.pagedkv, op).default, arguments, options, test_utils=_TESTS, raise_exception=False
            )
            for test, result in found.items():
                passed = result == "SUCCESS"
                reason = None if passed else f"{type(result).__name__}: {str(result).strip().partition(chr(10))[0][:200]}"
                detail, error = f"call {number}, {test}", 0.0 if passed else math.inf
                yield Check(op, "opcheck", "mixed", detail, error, 0.0, "torch.library.opcheck", reason)
