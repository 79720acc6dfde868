"""The composed step: the published counts, block tables without the evicted blocks, bytes by storage and by formula."""

import dataclasses

import pytest
import torch

import pagedkv
from pagedkv.bench import end_to_end, memory, quality
from pagedkv.evidence import published


@pytest.mark.parametrize("where", end_to_end.PUBLISHED)
def test_the_published_counts_and_bytes_come_out(where):
    theirs = next(row for row in published("end_to_end") if row["device"] == where)
    facts = end_to_end.compose(end_to_end.prepare(*end_to_end.PUBLISHED[where])).facts
    for field in ("num_seqs", "num_blocks", "evicted", "seqs_touched"):
        assert theirs.get(field) in (None, facts[field])
    for field in ("fp32_mib", "int8_mib", "savings_percent_vs_fp32"):
        assert theirs.get(field) is None or round(facts[field], 1) == theirs[field]
    assert facts["finite"] and facts["rel_error_after_eviction"] < 0.02


def test_a_table_keeps_its_order_without_the_evicted_blocks():
    tables = torch.tensor([[7, 3, 9, 1], [2, 8, -1, -1], [5, -1, -1, -1], [6, 4, 0, -1]], dtype=torch.int32)
    lens = torch.tensor([61, 32, 9, 40], dtype=torch.int32)
    kept, left = end_to_end.drop_blocks(tables, lens, torch.tensor([3, 1, 5, 0]), block_size=16)
    assert kept.tolist() == [[7, 9, -1, -1], [2, 8, -1, -1], [-1, -1, -1, -1], [6, 4, -1, -1]]
    assert left.tolist() == [32, 32, 0, 32] and left.dtype == torch.int32


def test_a_partly_filled_block_that_stays_is_last():
    tables = torch.tensor([[7, 3, 9, 1]], dtype=torch.int32)
    kept, left = end_to_end.drop_blocks(tables, torch.tensor([61], dtype=torch.int32), torch.tensor([7]), block_size=16)
    assert kept.tolist() == [[3, 9, 1, -1]] and left.tolist() == [45]


def test_attention_over_the_remaining_blocks_is_attention_over_those_tokens(device):
    step = end_to_end.prepare(5, 90, device)
    p = step.problem
    evicted, _ = pagedkv.evict_blocks(step.recency, step.frequency, step.attention_mass, step.valid_mask, 9)
    tables, lens = end_to_end.drop_blocks(p.block_tables, p.seq_lens, evicted, 16)
    out = pagedkv.paged_attention(p.q, p.k, p.v, tables, lens, p.sm_scale)
    gone = p.k.clone()
    gone[evicted] = torch.nan  # what was evicted is not read any more
    assert torch.equal(out, pagedkv.paged_attention(p.q, gone, p.v, tables, lens, p.sm_scale))
    truth = quality.exact_attention(dataclasses.replace(p, block_tables=tables, seq_lens=lens))
    assert quality.errors(out, truth)["max_abs"] < 1e-5


def test_stages_can_be_run_again():
    composed = end_to_end.compose(end_to_end.prepare(4, 60))
    assert list(composed.stages) == ["evict", "drop_blocks", "quantise", "attention, whole pool", "attention, remaining blocks"]
    for call in composed.stages.values():
        assert call() is not None


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("granularity", memory.GRANULARITIES)
@pytest.mark.parametrize("pool", [memory.Pool(6, 3, 64), memory.Pool(5, 1, 8, block_size=7), memory.Pool(1, 2, 256, block_size=1)])
def test_the_tensors_hold_the_bytes_of_the_formula(pool, granularity, device):
    found = memory.measured(pool, granularity, device)
    assert found == {"fp16_bytes": pool.fp16_bytes(), "int8_bytes": pool.int8_bytes(granularity), "how": "allocated"}


def test_a_pool_that_does_not_fit_is_answered_by_shapes(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    pool = memory.Pool(1 << 24, 8, 128)
    found = memory.measured(pool, "token_head")
    assert found["how"].startswith("shapes (") and found["int8_bytes"] == pool.int8_bytes("token_head")


def test_the_published_bytes_come_out():
    theirs = {row["pool"]: row for row in published("memory")}
    assert set(theirs) == {pool.name for pool in memory.PUBLISHED}
    for pool in memory.PUBLISHED:
        assert pool.fp16_bytes() / memory.MIB == theirs[pool.name]["fp16_mib"]
        assert pool.int8_bytes("block_head") / memory.MIB == theirs[pool.name]["int8_mib"]


def test_held_counts_a_storage_once_and_whole():
    base = torch.zeros(100, dtype=torch.int16)
    assert memory.held(base[:10], base[50:], torch.zeros(3)) == 212
