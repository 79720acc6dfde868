"""The decode loop under a budget: who holds what after each period is what the reference says."""

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import reference
from pagedkv.bench import decode_loop
from pagedkv.bench.decode_loop import VARIANTS, Loop, Setting

SMALL = Setting(5, num_seqs=6, num_heads=4, num_kv_heads=2, head_dim=16, block_size=4)


def test_each_period_lets_go_what_the_reference_does(device):
    loop = Loop(SMALL, device)
    for _ in range(6):
        before, total = loop.block_tables.clone(), loop.total.clone()
        loop.period("accumulate")
        gained = loop.total - total
        assert float(gained.sum()) * pagedkv.MASS_UNIT == pytest.approx(SMALL.num_seqs, rel=1e-4)
        assert torch.equal(loop.block_tables, before)
        tables, lens, freed, count, _ = reference.select_per_sequence(
            loop.total.float(), loop.block_tables, loop.lens[-1], SMALL.budget, block_size=SMALL.block_size
        )
        loop.evict()
        assert count == SMALL.num_seqs and np.array_equal(lens, loop.lens[0].cpu() - 1)
        np.testing.assert_array_equal(loop.block_tables[:, : SMALL.budget].cpu(), tables[:, : SMALL.budget])
        np.testing.assert_array_equal(loop.block_tables[:, SMALL.budget].cpu(), freed[: SMALL.num_seqs])
        assert not loop.total[loop.block_tables[:, SMALL.budget].long()].any(), "a new owner starts from nothing"
        assert loop.sound() == {"every_block_once": True, "finite": True}


def test_tokens_are_written_where_the_tables_say(device):
    loop = Loop(SMALL, device)
    loop.period("evict")
    for step in range(SMALL.block_size):
        for s in range(SMALL.num_seqs):
            place, offset = divmod(int(loop.lens[step, s]) - 1, SMALL.block_size)
            assert loop.slots[step, s] == int(loop.block_tables[s, place]) * SMALL.block_size + offset


def test_a_run_times_every_variant(device):
    loop = Loop(SMALL, device)
    samples = decode_loop.run(loop, periods=3)
    assert loop.sound() == {"every_block_once": True, "finite": True}
    rows = list(decode_loop.rows(SMALL, samples))
    assert [row.get("variant") for row in rows] == [*VARIANTS, None]
    assert all(row["steps"] == 12 and row["p50_us"] > 0 for row in rows[:4])


def test_shares_of_a_step():
    samples = {variant: [float(t)] * 3 for variant, t in zip(VARIANTS, (90, 95, 96, 100), strict=True)}
    *_, share = decode_loop.rows(SMALL, samples)
    assert {key: share[key] for key in ("block_mass", "accumulate", "evict", "decode_share")} == {
        "block_mass": 5,
        "accumulate": 1,
        "evict": 4,
        "decode_share": 5,
    }


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_settings(kind):
    assert all(s.num_seqs == 64 for s in decode_loop.settings(torch.device(kind)))
