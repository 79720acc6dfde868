"""The policies beside kvpress's rules of the same name: its score of each token, averaged over heads and over the block.

Optional: `pip install kvpress`.
"""

import math

import numpy as np
import pytest
import torch
from cases import decode

import pagedkv
from pagedkv.policies import Observation, mass_at_places, policy

kvpress = pytest.importorskip("kvpress")

LENGTH, BLOCK = 16 * 24, 16  # tokens, in whole blocks: kvpress knows no pages
NUM_BLOCKS = LENGTH // BLOCK


@pytest.fixture(scope="module")
def case():
    return decode("cpu", cache="float32", lengths=(LENGTH,), heads=4, kv_heads=2, head_dim=32)


def dense(cache, case):
    """`[1, num_kv_heads, tokens, head_dim]`, as kvpress holds it."""
    return cache[case.block_tables[0, :NUM_BLOCKS].long()].flatten(0, 1).transpose(0, 1)[None]


def press_scores(press, case, attentions=None):
    scores = press.score(None, None, dense(case.k_cache, case), dense(case.v_cache, case), attentions, {})
    return scores[0].mean(0).view(NUM_BLOCKS, BLOCK).mean(1).double().numpy()


def own_scores(name, case, **more):
    parameters = {key: more.pop(key) for key in ("lag_blocks", "sink_blocks") if key in more}
    seen = Observation(case.block_tables, case.seq_lens, BLOCK, case.k_cache, None, case.v_cache, None, **more)
    return policy(name, **parameters)(seen)[0, :NUM_BLOCKS].double().numpy()


def attentions_of(case, queries):
    """Softmax of each query over all tokens: `[1, num_heads, queries, tokens]`."""
    k = dense(case.k_cache, case)[0].repeat_interleave(2, 0)
    return torch.einsum("nhd,htd->hnt", queries, k).mul(case.sm_scale).softmax(-1)[None]


@pytest.mark.parametrize("name, press", [("key_norm", "KnormPress"), ("key_diff", "KeyDiffPress")])
def test_rules_that_look_at_keys(case, name, press):
    np.testing.assert_allclose(own_scores(name, case), press_scores(getattr(kvpress, press)(), case), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lag_blocks, sink_blocks", [(8, 1), (2, 1), (4, 2), (8, 0), (20, 1)])
def test_lag_kv(case, lag_blocks, sink_blocks):
    press = kvpress.LagKVPress(n_sink=sink_blocks * BLOCK, lag_size=lag_blocks * BLOCK)
    own = own_scores("lag_kv", case, lag_blocks=lag_blocks, sink_blocks=sink_blocks)
    np.testing.assert_allclose(own, press_scores(press, case), atol=1e-3)


def test_last_query_attention(case):
    """kvpress gives the last token more than any other, so that it stays: all blocks but the last are compared."""
    mass = case.run(return_block_mass=True)[1]
    want = press_scores(kvpress.TOVAPress(), case, attentions_of(case, case.q))
    np.testing.assert_allclose(own_scores("last_query_attention", case, block_mass=mass)[:-1], want[:-1], rtol=1e-4)


def test_accumulated_attention(case):
    """kvpress divides a token's sum by how many queries could see it; H2O does not, so its division is undone."""
    queries = torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(3))
    total = torch.zeros(len(case.k_cache), dtype=torch.int64)
    for q in queries:
        case.q = q[None]
        pagedkv.accumulate_block_mass(case.run(return_block_mass=True)[1], case.block_tables, total)
    attentions = attentions_of(case, queries)
    keys, values = dense(case.k_cache, case), dense(case.v_cache, case)
    scores = kvpress.ObservedAttentionPress().score(None, None, keys, values, attentions, {})[0]
    want = (scores * torch.arange(LENGTH, 0, -1)).mean(0).view(NUM_BLOCKS, BLOCK).mean(1).numpy()
    np.testing.assert_allclose(
        own_scores("accumulated_attention", case, total_mass=mass_at_places(total, case.block_tables)), want, rtol=1e-4
    )


def test_sinks_and_recency(case):
    """kvpress marks what goes at a ratio; here it is what a selection lets go at the budget that remains."""
    budget = 10
    press = kvpress.StreamingLLMPress(compression_ratio=1 - budget / NUM_BLOCKS + 1e-9, n_sink=BLOCK)
    kept = press_scores(press, case)
    scores = policy("sinks_and_recency")(Observation(case.block_tables, case.seq_lens, BLOCK))
    tables = pagedkv.select_per_sequence(scores, case.block_tables, case.seq_lens, budget, 0, 0, block_size=BLOCK)[0]
    left = [case.block_tables[0].tolist().index(b) for b in tables[0, :budget].tolist()]
    assert left == [j for j in range(NUM_BLOCKS) if not math.isclose(kept[j], 0)]
