"""The C++ kernels on the CPU: however many threads torch has, results are the same to the last bit.

Work is cut by shapes (`kernels/cpu/attention_plan.h`) or at places where a cut does not show, so this is equality, not a tolerance.
"""

import pytest
import torch
from cases import decode, same_bits
from test_arguments import OPS
from test_eviction import statistics

import pagedkv
from pagedkv.ops import build

# Each op, as a generator of calls that several threads share: of more work than the least that the kernel gives to one.


def rng():
    return torch.Generator().manual_seed(0)


def pool(num_blocks=300):
    return torch.randn(num_blocks, 16, 2, 64, generator=rng())


def attention(*caches):
    """Several splits, and parts of the heads, of sequences whose lengths differ."""
    for cache in caches:
        case = decode("cpu", lengths=(1000, 0, 1, 300), heads=8, kv_heads=4, cache=cache)
        yield lambda case=case: case.run(return_lse=True, return_block_mass=True)


def merge_attention_states():
    out, lse = torch.randn(2, 40, 8, 64, generator=rng()), torch.randn(2, 40, 8, generator=rng())
    yield lambda: pagedkv.merge_attention_states(out[0], lse[0], out[1], lse[1])


def quantize_kv():
    kv = pool()
    yield lambda: pagedkv.quantize_kv(kv)
    yield lambda: pagedkv.quantize_kv(kv, "token_head", rotated=True)


def dequantize_kv():
    encoded = pagedkv.quantize_kv(pool())
    yield lambda: [pagedkv.dequantize_kv(*encoded)]


def reshape_and_cache():
    """Tokens all over the pool, several to a block and louder than what is there; some go nowhere."""
    slots = torch.randperm(64 * 16, generator=rng())[:200]
    slots[::9] = -1
    new = torch.randn(2, 200, 2, 64, generator=rng()) * torch.linspace(0.5, 3, 200)[:, None, None]
    for granularity in ("block_head", "token_head"):
        cache = 2 * pagedkv.quantize_kv(pool(64), granularity)

        def call(cache=cache):
            copies = [x.clone() for x in cache]
            pagedkv.reshape_and_cache(*new, *copies, slots)
            return copies

        yield call


def eviction_scores():
    for block_size in (16, 13):
        signals = statistics("cpu", 5003, block_size)
        yield lambda signals=signals: [pagedkv.eviction_scores(*signals)]


def select_eviction_candidates():
    scores = torch.rand(200_000, generator=rng())
    for k in (1000, 100_000):
        yield lambda k=k: [pagedkv.select_eviction_candidates(scores, k)]


def evict_blocks():
    signals = statistics("cpu", 70_000, 4)
    yield lambda: pagedkv.evict_blocks(*signals, 700)


def accumulate_block_mass():
    mass, tables = torch.rand(64, 300, generator=rng()), torch.randint(0, 500, (64, 300), generator=rng(), dtype=torch.int32)

    def call():
        total = torch.zeros(500, dtype=torch.int64)
        pagedkv.accumulate_block_mass(mass, tables, total, 0.9)
        return [total]

    yield call


def select_per_sequence():
    tables = torch.randint(0, 700, (40, 30), generator=rng(), dtype=torch.int32)
    scores, held = torch.rand(700, generator=rng()), torch.bincount(tables.flatten(), minlength=700).int()
    lens = torch.full((40,), 30 * 16, dtype=torch.int32)

    def call():
        references = held.clone()
        return *pagedkv.select_per_sequence(scores, tables, lens, 12, block_size=16, references=references), references

    yield call


def statistics_of_a_pool(op):
    tables, lens = torch.randperm(200, generator=rng()).int().view(10, 20), torch.full((10,), 311, dtype=torch.int32)
    cache = pagedkv.quantize_kv(pool(200))
    yield lambda: op(*cache, tables, lens, blocks_per_group=3)


CALLS = {
    "quant_paged_attention": lambda: attention("block_head", "token_head"),
    "paged_attention": lambda: attention("float32", "bfloat16"),
    "merge_attention_states": merge_attention_states,
    "quantize_kv": quantize_kv,
    "dequantize_kv": dequantize_kv,
    "reshape_and_cache": reshape_and_cache,
    "eviction_scores": eviction_scores,
    "select_eviction_candidates": select_eviction_candidates,
    "evict_blocks": evict_blocks,
    "accumulate_block_mass": accumulate_block_mass,
    "select_per_sequence": select_per_sequence,
    "token_moments": lambda: statistics_of_a_pool(pagedkv.token_moments),
    "channel_statistics": lambda: statistics_of_a_pool(pagedkv.channel_statistics),
}


def with_threads(n, call):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(build.missing_tool("cpu") is not None, reason="no compiler here")
@pytest.mark.parametrize("op", OPS)
def test_the_number_of_threads_changes_no_bit(op):
    for call in CALLS[op]():
        one, *others = (with_threads(n, call) for n in (1, 2, 4))
        for results in others:
            assert all(same_bits(a, b) for a, b in zip(results, one, strict=True))
