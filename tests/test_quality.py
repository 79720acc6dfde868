"""The quality measurement: the published data from the published seed, a float64 truth, and errors against it."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import reference
from pagedkv.bench import distributions, quality
from pagedkv.evidence import published
from pagedkv.kv_dump import Dump


def problem(seed=0, num_seqs=4, max_seq_len=70, **sizes):
    return distributions.published(np.random.default_rng(seed), num_seqs=num_seqs, max_seq_len=max_seq_len, **sizes)


@pytest.mark.parametrize("name", distributions.DISTRIBUTIONS)
def test_the_published_figures_come_out_to_the_digits_that_were_printed(name, device):
    theirs = next(row for row in published("quality") if row["data"] == name)
    ours = next(quality.measure(distributions.DISTRIBUTIONS[name](0), device, ["int8_block_head"]))
    for field in ("rmse", "max_abs", "out_std"):
        assert float(f"{ours[field]:.3g}") == theirs[field]


def test_the_problem_is_one_that_a_paged_cache_can_hold():
    p = problem(max_seq_len=200, num_seqs=9)
    used = p.block_tables[p.block_tables >= 0]
    assert len(used) == len(set(used.tolist())) == p.k.shape[0] - 3, "every block but three is used, by one sequence"
    assert (p.block_tables >= 0).sum(1).tolist() == [math.ceil(n / 16) for n in p.seq_lens.tolist()]


def test_heavy_tails_are_one_in_a_thousand():
    gaussian, heavy = distributions.gaussian(3), distributions.heavy_tailed(3)
    ratio = heavy.k / gaussian.k
    assert torch.equal(heavy.v, gaussian.v * 8)
    spiked = (ratio - 80).abs() < 1e-2
    assert torch.allclose(ratio[~spiked], torch.tensor(8.0))
    assert 0.0007 < spiked.double().mean() < 0.0013


@pytest.mark.parametrize("sizes", [{}, {"num_heads": 9, "num_kv_heads": 3}, {"num_heads": 8, "num_kv_heads": 1, "head_dim": 24}])
def test_the_truth_agrees_with_the_reference(sizes):
    p = problem(**sizes)
    want = reference.paged_attention(p.q, p.k, p.v, p.block_tables, p.seq_lens, p.sm_scale)
    np.testing.assert_allclose(quality.exact_attention(p).numpy(), want, rtol=1e-10, atol=1e-12)


def test_the_truth_of_an_empty_sequence_is_zero_and_a_nan_is_not_hidden():
    p = problem()
    p.seq_lens[1] = 0
    p.v[p.block_tables[2, 0], 0] = torch.nan
    truth = quality.exact_attention(p)
    assert (truth[1] == 0).all() and truth[2].isnan().all() and truth[[0, 3]].isfinite().all()


def test_sequences_that_share_blocks_have_the_truth_of_each():
    p = problem(num_seqs=1, max_seq_len=90)
    lengths = torch.tensor([1, 5, int(p.seq_lens)], dtype=torch.int32)
    shared = dataclasses.replace(p, q=p.q.repeat(3, 1, 1), block_tables=p.block_tables.repeat(3, 1), seq_lens=lengths)
    together = quality.exact_attention(shared)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(together[i : i + 1], quality.exact_attention(dataclasses.replace(p, seq_lens=length[None])))


def test_errors_are_what_they_are_called():
    truth = torch.tensor([3.0, -3.0, 3.0, -3.0], dtype=torch.float64)
    found = quality.errors(truth + torch.tensor([0.0, 0.0, 0.0, 1.2]), truth)
    assert found == pytest.approx({"rmse": 0.6, "max_abs": 1.2, "out_std": 3.0, "rel_error": 0.2}, rel=1e-6)


def test_weights_of_the_same_k_agree_and_of_another_differ_by_the_textbook():
    p = problem()
    truth = quality.Truth(p)
    assert truth.weight_errors(p.k) == {"weight_kl": 0.0, "top1_agreement": 1.0}
    k = p.k + 0.3 * torch.randn(p.k.shape, generator=torch.Generator().manual_seed(5))
    found, divergences, same = truth.weight_errors(k), [], []
    for s, length in enumerate(p.seq_lens.tolist()):
        blocks = p.block_tables[s, : -(-length // 16)].long()
        for h in range(8):
            weights = [
                (pool[blocks, :, h // 2].flatten(0, 1)[:length].double() @ p.q[s, h].double() * p.sm_scale).softmax(0) for pool in (p.k, k)
            ]
            divergences.append((weights[0] * (weights[0] / weights[1]).log()).sum())
            same.append(float(weights[0].argmax() == weights[1].argmax()))
    assert found["weight_kl"] == pytest.approx(float(torch.stack(divergences).mean())) and found["weight_kl"] > 0
    assert found["top1_agreement"] == pytest.approx(np.mean(same))


# ------------------------------------------------------------------------------------------ real dumps


def dump(layers=2, tokens=50, queries=6) -> Dump:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, layers, tokens, 3, 16, generator=generator)
    return Dump(torch.randn(layers, queries, 9, 16, generator=generator), k, v, None, 0.25)


def test_a_dump_becomes_one_decode_step_for_each_query():
    d = dump()
    p = distributions.causal(d.q[0], d.k[0], d.v[0], d.sm_scale)
    assert p.seq_lens.tolist() == [45, 46, 47, 48, 49, 50]
    for i, length in enumerate(p.seq_lens.tolist()):
        k, v = (t[0, :length].repeat_interleave(3, dim=1).double() for t in (d.k, d.v))
        weights = (torch.einsum("hd,lhd->hl", d.q[0, i].double(), k) * 0.25).softmax(1)
        torch.testing.assert_close(quality.exact_attention(p)[i], torch.einsum("hl,lhd->hd", weights, v))


def test_what_pads_the_last_block_does_not_matter():
    d = dump(tokens=49)
    p = distributions.causal(d.q[0], d.k[0], d.v[0], d.sm_scale)
    out = pagedkv.paged_attention(p.q, p.k, p.v, p.block_tables, p.seq_lens, p.sm_scale)
    p.k[p.block_tables[0, -1], 1:] = torch.nan
    assert torch.equal(out, pagedkv.paged_attention(p.q, p.k, p.v, p.block_tables, p.seq_lens, p.sm_scale))


def test_layers_are_measured_and_summarised():
    rows = list(quality.layers(dump()))
    assert [(row["layer"], row["scheme"]) for row in rows] == [(i, s) for i in range(2) for s in quality.COMPARED]
    summary = {row["scheme"]: row for row in quality.summarise(rows)}
    mine = [row["rel_error"] for row in rows if row["scheme"] == "int8_block_head"]
    found = summary["int8_block_head"]
    assert found["rel_error"] == pytest.approx(sum(mine) / 2) and found["rel_error_worst"] == max(mine)
    assert mine[found["worst_layer"]] == max(mine) and found["layers_fp8_better"] == 0
    assert summary["float16"]["layers"] == 2
