"""Ways to hold a cache: each comes near the truth, takes the bytes it says, and mends what it is for."""

import dataclasses

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.bench import distributions, quality, schemes
from pagedkv.bench.schemes import SCHEMES
from pagedkv.quant_spec import KV_SPECS


def problem(seed=0, num_seqs=4, max_seq_len=70, **sizes):
    return distributions.published(np.random.default_rng(seed), num_seqs=num_seqs, max_seq_len=max_seq_len, **sizes)


def errors(p, *names, device="cpu"):
    return {row["scheme"]: row["rel_error"] for row in quality.measure(p, device, names)}


def test_every_spec_that_quantises_is_a_scheme():
    assert {f"int8_{name}" for name, spec in KV_SPECS.items() if spec.quantised} <= set(SCHEMES)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_every_scheme_comes_near_the_truth_and_none_is_exact(name, head_dim, device):
    p = problem(head_dim=head_dim)
    (row,) = quality.measure(p, device, [name])
    assert 0 < row["rel_error"] < 0.06 and row["rmse"] <= row["max_abs"] and 0 < row["weight_kl"] < 0.01 and row["top1_agreement"] > 0.9
    held = SCHEMES[name].hold(p.to(device))
    assert held.k.dtype == held.v.dtype == torch.float32
    torch.testing.assert_close(held.k.cpu(), p.k, rtol=0.07, atol=0.05)
    torch.testing.assert_close(held.v.cpu(), p.v, rtol=0.07, atol=0.05)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_output_is_attention_over_the_decoded_cache(name, device):
    """What the kernel computes from the encoded cache is what the weights are judged on."""
    p = problem()
    held = SCHEMES[name].hold(p.to(device))
    decoded = quality.exact_attention(dataclasses.replace(p, k=held.k.cpu(), v=held.v.cpu()))
    torch.testing.assert_close(held.out.cpu().double(), decoded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_bytes_of_a_scheme_are_those_of_its_tensors(name):
    p = problem(num_seqs=1, max_seq_len=16, head_dim=24)
    p = dataclasses.replace(p, seq_lens=torch.tensor([16], dtype=torch.int32), block_tables=p.block_tables[:, :1], k=p.k[:1], v=p.v[:1])
    per_token, per_channel = p.k[..., 0].half(), p.k[:, 0].half()
    held = {
        "fp8_e4m3_token_head": 2 * [p.k.to(torch.float8_e4m3fn), per_token.float()],
        "asymmetric_token_head": 2 * [p.k.byte(), per_token, per_token],
        "k_per_channel": [p.k.byte(), per_channel, per_channel, p.v.byte(), per_token, per_token],
        "float16": [p.k.half(), p.v.half()],
    }.get(name)
    if held is None:
        spec = KV_SPECS[name.removeprefix("int8_")]
        held = [*pagedkv.quantize_kv(p.k, spec.granularity), *pagedkv.quantize_kv(p.v, spec.granularity)]
        held += [p.k[0, 0]] if spec.subtract_k_mean else []
    share = sum(t.numel() * t.element_size() for t in held) / (2 * 2 * p.k.numel())
    assert SCHEMES[name].percent_of_fp16(p) == pytest.approx(100 * share)


def test_the_budget_is_a_scale_for_each_token_of_128():
    p = problem(head_dim=128)
    within = {name for name, scheme in SCHEMES.items() if scheme.percent_of_fp16(p) <= schemes.BUDGET}
    assert {"int8_token_head", "int8_rotated_token_head", "fp8_e4m3_token_head", "asymmetric_token_head"} <= within
    assert not {"k_per_channel", "float16"} & within


def test_schemes_rank_as_their_bits_do(device):
    error = errors(distributions.gaussian(1), *quality.PLAIN, device=device)
    assert error["float16"] < error["int8_token_head"] < error["int8_block_head"] < error["fp8_e4m3_token_head"]


def test_rotation_mends_outliers_and_a_mean_what_all_tokens_share(device):
    spiked = errors(distributions.heavy_tailed(1), "int8_block_head", "int8_rotated_block_head", device=device)
    assert spiked["int8_rotated_block_head"] < spiked["int8_block_head"] / 2
    channels = errors(
        distributions.channel_outliers(1), "int8_block_head", "int8_rotated_block_head", "int8_k_mean_rotated_block_head", device=device
    )
    assert channels["int8_k_mean_rotated_block_head"] < channels["int8_rotated_block_head"] < channels["int8_block_head"]


def test_the_mean_is_that_of_the_prompt():
    p = problem(num_seqs=2, max_seq_len=40)
    p = dataclasses.replace(
        p, q=p.q.repeat(2, 1, 1), block_tables=p.block_tables.repeat(2, 1), seq_lens=torch.cat([p.seq_lens, p.seq_lens - 1])
    )
    means = schemes.prompt_means(p)
    for s in (0, 1):
        blocks = p.block_tables[s, : -(-int(p.seq_lens[s]) // 16)].long()
        prompt = p.k[blocks].flatten(0, 1)[: int(p.seq_lens[s]) - 1]
        torch.testing.assert_close(means[blocks], prompt.mean(0).expand_as(p.k[blocks]))


def test_fp8_keeps_three_bits_of_mantissa():
    kv = torch.randn(50, 16, 4, 64, generator=torch.Generator().manual_seed(0))
    kv[0, 0, 0] = 0
    decoded = schemes.round_to_fp8(kv)
    assert (decoded[0, 0, 0] == 0).all()
    large = kv.abs() > kv.abs().amax(-1, keepdim=True) / 100
    assert ((decoded - kv).abs() <= kv.abs() / 16 * 1.0001)[large].all()


def test_asymmetric_levels_span_the_values():
    kv = 5 + torch.rand(3, 16, 2, 64, generator=torch.Generator().manual_seed(0))
    assert ((schemes.asymmetric(kv, 3) - kv).abs() <= 1 / 255 / 2 + 0.004).all()  # half a step, and the offset's rounding to float16
