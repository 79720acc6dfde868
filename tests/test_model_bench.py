"""The model evaluations on a tiny random model: each number against a second way to it, or against what must be so."""

import dataclasses
import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from pagedkv import models  # noqa: E402
from pagedkv.bench import eviction_quality, generate, kvpress_peer, model_variants, perplexity  # noqa: E402
from pagedkv.integrations.transformers import PagedCache  # noqa: E402
from pagedkv.kv_dump import ModelError  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"), pytest.mark.usefixtures("plain_pytorch")]


def quiet(_):
    pass


@pytest.fixture(scope="module")
def model():
    return models.tiny()[1]


@pytest.fixture(scope="module")
def ids():
    _, _, tokenizer, text = models.tiny()
    return model_variants.text_tokens(tokenizer, text)


# -------------------------------------------------------------------------------------------------------------------- perplexity


@pytest.fixture(scope="module")
def perplexities(model, ids):
    sizes = model_variants.Sizes(windows=3, context=40, scored=6, together=2)
    return {row["variant"]: row for row in perplexity.measure(model, ids, sizes, say=quiet)}


def test_perplexity_through_the_cache_is_that_of_one_forward_pass(perplexities, model, ids):
    model.set_attn_implementation("sdpa")
    text = model_variants.windows(ids, 3, 47)
    with torch.inference_mode():
        log_p = model(text).logits.log_softmax(-1)
    nll = -log_p[:, 40:46].gather(2, text[:, 41:47, None])
    assert perplexities["float32"]["tokens"] == nll.numel() == 18
    assert perplexities["float32"]["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-4)


def test_every_scheme_has_a_row_and_the_exact_ones_change_nothing(perplexities):
    assert list(perplexities) == list(perplexity.schemes())
    for name, row in perplexities.items():
        exact = name in ("float32", "rotated_unquantised")
        assert (row["kl"] < 1e-6) == exact, name
        assert row["kl_low"] <= row["kl"] <= row["kl_high"] and row["perplexity_low"] <= row["perplexity"] <= row["perplexity_high"]
    assert perplexities["float32"]["delta_percent"] == 0 and perplexities["float32"]["agreement"] == 1
    assert perplexities["float16"]["kl"] < perplexities["block_head"]["kl"] < perplexities["fp8_e4m3_token_head"]["kl"]


def test_bytes_are_those_of_the_specs(perplexities):
    percent = {name: row["percent_of_fp16"] for name, row in perplexities.items()}
    assert percent["float32"] == 200 and percent["float16"] == 100
    assert percent["block_head"] == pytest.approx(100 * (16 * 16 + 4) / (2 * 16 * 16))
    assert percent["token_head"] == percent["fp8_e4m3_token_head"] == pytest.approx(100 * (16 + 4) / (2 * 16))


def test_the_best_int8_scheme_is_one_within_the_bytes(perplexities):
    rows = [{**row, "percent_of_fp16": 50 if "block" in row["variant"] else row["percent_of_fp16"]} for row in perplexities.values()]
    best = perplexity.best_int8(rows)
    assert "block_head" in best["variant"] and best["kl"] == min(row["kl"] for row in rows if "block_head" in row["variant"])
    assert best["kl_vs_fp8"] == pytest.approx(best["kl"] / perplexities["fp8_e4m3_token_head"]["kl"])
    assert best["block_head_delta_percent"] == perplexities["block_head"]["delta_percent"]


def test_windows_do_not_overlap_and_a_short_text_is_refused(ids):
    windows = model_variants.windows(torch.arange(100), 3, 30)
    assert windows[:, 0].tolist() == [0, 33, 66] and windows.shape == (3, 30)
    with pytest.raises(ModelError, match="the text has 100 tokens"):
        model_variants.windows(torch.arange(100), 4, 26)


@pytest.mark.parametrize("sizes", [*perplexity.SIZES.values(), *eviction_quality.SIZES.values()], ids=str)
def test_the_text_has_room_for_every_size(sizes):
    text = torch.arange(39357)  # tokens of alice29.txt
    batches = list(sizes.batches(text))
    assert sum(len(prompts) for prompts, _ in batches) == sizes.windows and max(len(prompts) for prompts, _ in batches) <= sizes.together
    for prompts, following in batches:
        assert prompts.shape[1] == sizes.context and following.shape[1] == sizes.scored + 1
        assert torch.equal(following[:, 0], prompts[:, -1] + 1)


def test_larger_on_a_gpu():
    for bench in (perplexity, eviction_quality):
        cpu, cuda = (bench.SIZES[kind].windows * bench.SIZES[kind].scored for kind in ("cpu", "cuda"))
        assert cuda >= 4096 and cuda >= 4 * cpu
    assert perplexity.SIZES["cpu"].windows * perplexity.SIZES["cpu"].scored >= 2048
    for needles in eviction_quality.NEEDLES.values():
        assert len({needle.depth for needle in needles}) == 10 and {needle.length for needle in needles} == {1024, 2048, 4096}


def test_intervals_are_shown_beside_their_values_and_as_bars():
    rows = [{"variant": "a", **model_variants.with_interval("kl", torch.tensor([1.0, 3.0]))}, {"variant": "b", "kl": None}]
    shown = model_variants.for_readers(rows, ["variant", "kl", "other"])
    assert shown == [{"variant": "a", "kl": "2 (1 to 3)", "other": None}, {"variant": "b", "kl": None, "other": None}]
    assert model_variants.error_bars(rows[:1], "kl") == ([2], [[1], [1]])


def test_an_interval_of_a_median_ignores_a_lone_outlier():
    value, low, high = model_variants.interval(torch.tensor([1.0] * 30 + [1000.0]), model_variants.median)
    assert (value, low, high) == (1, 1, 1)


def test_a_bootstrap_interval_covers_the_mean_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(60):
        value, low, high = model_variants.interval(torch.randn(40, generator=generator))
        assert low <= value <= high
        inside += low <= 0 <= high
    assert 50 <= inside <= 60


# ---------------------------------------------------------------------------------------------------------------------- eviction


SMALL = model_variants.Sizes(windows=3, context=64, scored=5, together=2)


@pytest.fixture(scope="module")
def small_eviction():
    sizes = pytest.MonkeyPatch()
    for name, value in {"BLOCK_SIZE": 4, "WATCH": 8}.items():
        sizes.setattr(eviction_quality, name, value)
    yield
    sizes.undo()


def test_every_policy_and_fraction_is_measured_on_the_same_tokens(model, ids, small_eviction):
    rows = list(eviction_quality.continuation(model, ids, {}, SMALL, say=quiet))
    variants = {row["variant"]: row for row in rows}
    policies, on_int8 = list(eviction_quality.REGISTRY), list(filter(eviction_quality.on_int8, eviction_quality.REGISTRY))
    assert set(policies) - set(on_int8) == {"lag_kv"}
    assert len(variants) == len(rows) == 2 + 4 * (len(policies) + len(on_int8) + 2)
    assert {row["tokens"] for row in rows} == {15}
    assert variants["everything 0%"]["kl"] == 0 and variants["sinks_and_recency 50%"]["vs_streaming"] == 1
    best = eviction_quality.best_at(rows, 0.5)
    assert best["perplexity"] == min(
        r["perplexity"] for r in rows if (r["fraction"], r["cache"]) == (0.5, "float32") and r["policy"] != "sinks_and_recency"
    )
    assert best["kvpress_best"] is best["vs_kvpress"] is best["vs_kvpress_low"] is None
    assert best["variant"] in eviction_quality.verdict(best) and "kvpress" not in eviction_quality.verdict(best)
    panels = eviction_quality.panels(rows)
    assert {title: len(lines) for title, lines in panels.items()} == {"float32 cache": len(policies) + 2, "int8 cache": len(on_int8)}
    assert {tuple(row["fraction"] for row in line) for lines in panels.values() for line in lines} == {(0.1, 0.25, 0.5, 0.75)}
    for policy in policies:
        assert variants[f"{policy} 10%"]["kl"] > 0, policy


def test_int8_on_top_is_held_against_the_same_eviction_in_float32(model, ids, small_eviction):
    variants = {row["variant"]: row for row in eviction_quality.continuation(model, ids, {}, SMALL, say=quiet)}
    on_int8 = {name: row for name, row in variants.items() if row["cache"] == "int8"}
    assert len(on_int8) == 1 + 4 * sum(map(eviction_quality.on_int8, eviction_quality.REGISTRY))
    for name, row in on_int8.items():
        assert row["vs_float32"] == pytest.approx(row["perplexity"] / variants[name.removesuffix(" int8")]["perplexity"])
        assert row["vs_float32_low"] <= row["vs_float32"] <= row["vs_float32_high"] and row["vs_float32"] != 1
    assert not any("vs_float32" in row for name, row in variants.items() if name not in on_int8)


def test_the_yardsticks_are_sinks_and_recency_and_the_best_of_kvpress():
    variants = [v for mine in eviction_quality.plan(["A", "B"]) for v in mine]
    nll = torch.arange(2.0 * len(variants)).view(-1, 2)  # the earlier, the better
    found = eviction_quality.yardsticks(variants, nll)
    names = [v.name for v in variants]
    for fraction in eviction_quality.FRACTIONS:
        assert torch.equal(found[fraction]["vs_streaming"], nll[names.index(f"sinks_and_recency {fraction:.0%}")])
        assert torch.equal(found[fraction]["vs_kvpress"], nll[names.index(f"kvpress A by layer and head {fraction:.0%}")])


@pytest.mark.parametrize("low, high, said", [(0.8, 0.99, "better than"), (1.01, 1.2, "worse than"), (0.9, 1.1, "not distinguishable from")])
def test_the_verdict_claims_no_more_than_its_intervals(low, high, said):
    streaming = {"variant": "x 50%", "vs_streaming": 1.0, "vs_streaming_low": 0.9, "vs_streaming_high": 1.1}
    peer = {"kvpress_best": "kvpress A", "vs_kvpress": (low + high) / 2, "vs_kvpress_low": low, "vs_kvpress_high": high}
    text = eviction_quality.verdict({**streaming, **peer})
    assert "not distinguishable from sinks and recency" in text and f"{said} kvpress A" in text


def test_what_is_evicted_is_what_the_policy_names(model, ids, small_eviction):
    variants = eviction_quality.plan([])
    cache = eviction_quality.prompted(model, ids[None, :64].repeat(2, 1), variants, {})
    shared, by_layer, on_int8 = cache.members
    lengths = [shared.kv.length(seq) for seq in shared.seqs[::2]]
    kept = {0.0: 64, 0.1: 56, 0.25: 48, 0.5: 32, 0.75: 16}
    assert lengths == [kept[v.fraction] for v in variants[0]]
    assert [on_int8.kv.length(seq) for seq in on_int8.seqs[::2]] == [kept[v.fraction] for v in variants[2]]
    assert [by_layer.kv.length(seq, layer=2) for seq in by_layer.seqs[::2]] == [kept[v.fraction] for v in variants[1]]
    # Sinks and recency at 50 %: the first block and the last seven, which the fork of the whole prompt still shares.
    at = next(i for i, v in enumerate(variants[0]) if (v.policy, v.fraction) == ("sinks_and_recency", 0.5))
    whole, streamed = (shared.kv.pools[0].find(shared.seqs[2 * i]).blocks for i in (0, at))
    assert streamed == (whole[0], *whole[9:])


def test_a_fact_is_found_in_a_cache_that_holds_it(small_eviction, ids):
    """Asked with a model that copies: its first choice is what followed the last time."""
    _, model, tokenizer, _ = models.tiny()
    rows = list(eviction_quality.needles(model, tokenizer, ids, {}, [eviction_quality.Needle(0.5, 128)], say=quiet))
    assert {row["what"] for row in rows} == {"needle"} and all(row["found"] in (0, 1) for row in rows)
    by_name = {row["variant"]: row["answer_nll"] for row in rows}
    cache = PagedCache(model, "unquantised", block_size=4)
    fact, question, answer = (
        eviction_quality.tokens(tokenizer, text)
        for text in ("\nThe number of the blue door is 8919.\n", "\nNow remember: the number of the blue door is", " 8919")
    )
    start = round(0.5 * (128 - len(fact)))
    prompt = torch.cat([ids[:start], fact, ids[start : 128 - len(fact)], question, answer])[None]
    with torch.inference_mode():
        log_p = model(prompt, past_key_values=cache).logits[0, -1 - len(answer) : -1].log_softmax(-1)
    want = -log_p.gather(1, answer[:, None]).mean()
    assert by_name["everything 0%"] == pytest.approx(float(want), rel=1e-4)


def test_needles_asked_together_are_answered_as_alone(monkeypatch, small_eviction, ids):
    plan = eviction_quality.plan
    monkeypatch.setattr(eviction_quality, "plan", lambda presses: [mine[::5] for mine in plan(presses)])  # other shares of other policies
    _, model, tokenizer, _ = models.tiny()
    planted = [eviction_quality.Needle(depth, length) for depth, length in ((0.1, 128), (0.5, 256), (0.9, 128), (0.3, 128))]
    together = list(eviction_quality.needles(model, tokenizer, ids, {}, planted, say=quiet))
    assert list(eviction_quality.batches(planted, 256)) == [[0, 2], [3], [1]]
    monkeypatch.setitem(eviction_quality.NEEDLE_TOKENS, "cpu", 1)
    assert list(eviction_quality.batches(planted, 1)) == [[0], [2], [3], [1]]
    alone = list(eviction_quality.needles(model, tokenizer, ids, {}, planted, say=quiet))
    for a, b in zip(together, alone, strict=True):
        assert (a["variant"], a["found_at"]) == (b["variant"], b["found_at"])
        assert a["answer_nll"] == pytest.approx(b["answer_nll"], rel=1e-4)
    numbers = [eviction_quality.number(i) for i in range(30)]
    assert len(set(numbers)) == 30 and all(len(str(n)) == 4 for n in numbers)


def test_kvpress_absent_is_said(monkeypatch):
    def missing(name):
        raise kvpress_peer.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(kvpress_peer.importlib.metadata, "version", missing)
    assert kvpress_peer.version() is None and kvpress_peer.presses() == {}
    assert "pip install 'pagedkv[peers]'" in kvpress_peer.absences()["kvpress"]


def test_a_rule_of_kvpress_that_is_left_out_is_said():
    pytest.importorskip("kvpress")
    assert "eager attention" in kvpress_peer.absences()["kvpress ObservedAttentionPress"]
    assert list(kvpress_peer.presses()) == list(kvpress_peer.RULES)
    assert kvpress_peer.version() == kvpress_peer.importlib.metadata.version("kvpress")


def test_against_kvpress_is_paired_on_the_same_tokens(model, ids, small_eviction):
    pytest.importorskip("kvpress")
    rows = list(eviction_quality.continuation(model, ids, kvpress_peer.presses(), dataclasses.replace(SMALL, context=96), say=quiet))
    best = eviction_quality.best_at(rows, 0.5)
    assert best["vs_kvpress"] == pytest.approx(best["perplexity"] / best["kvpress_perplexity"])
    assert best["vs_kvpress_low"] <= best["vs_kvpress"] <= best["vs_kvpress_high"]
    (peer,) = [row for row in rows if (row["policy"], row["fraction"]) == (best["kvpress_best"], 0.5)]
    assert peer["vs_kvpress"] == peer["vs_kvpress_low"] == peer["vs_kvpress_high"] == 1


def test_a_press_keeps_what_kvpress_itself_keeps(ids, small_eviction):
    kvpress = pytest.importorskip("kvpress")
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 3):
        pytest.skip("kvpress 0.5.5 presses a DynamicCache as transformers had it before 5.3")
    _, model, _, _ = models.tiny()
    length = 320  # LagKV's two lags and its sinks have room
    prompt, following = ids[None, :length], ids[None, length : length + 3]
    rules = kvpress_peer.presses()
    peer = kvpress_peer.PressCache(model, rules, [0.25, 0.5])
    cache = model_variants.Ensemble(model, [PagedCache(model, "unquantised"), peer])
    with torch.inference_mode():
        model(prompt, past_key_values=cache, logits_to_keep=1)
        got = [model(token.repeat(1 + 2 * len(rules), 1), past_key_values=cache).logits[1:, -1] for token in following.split(1, 1)]
        model.set_attn_implementation("sdpa")
        for i, (name, fraction) in enumerate((name, fraction) for name in rules for fraction in (0.25, 0.5)):
            alone = transformers.DynamicCache()
            with getattr(kvpress, name)(compression_ratio=fraction)(model):
                model(prompt, past_key_values=alone)
            assert alone.layers[0].keys.shape[2] == length * (1 - fraction)
            for t, token in enumerate(following.split(1, 1)):
                place = torch.tensor([[length + t]])
                want = model(token, past_key_values=alone, position_ids=place).logits[0, -1]
                torch.testing.assert_close(got[t][i], want, rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------------------------------------- generation


def test_generation_is_exact_and_lossy_caches_are_compared(model, ids):
    row, want = generate.exact(model, ids, (50, 9), new_tokens=12)
    assert row["equal"] == row["tokens"] == 24 and row["longest_prompt"] == 50
    rows = {r["cache"]: r for r in generate.continued(model, ids, want, (50, 9), new_tokens=6)}
    assert list(rows) == list(generate.lossy())
    for r in rows.values():
        assert 0 <= r["same_tokens"] <= 6 and len(r["each"].split()) == 2


def test_caches_together_generate_what_each_generates_alone(model, ids):
    inputs = generate.prompts(ids, (50, 9))
    options = [{**o, "budget": 24} if "budget" in o else o for o in generate.lossy().values()]
    both = generate.together(model, inputs, [PagedCache(model, **o) for o in options], 8)
    alone = [generate._greedy(model, inputs, PagedCache(model, **o), 8) for o in options]
    assert torch.equal(both, torch.stack(alone))


def test_speed_is_by_the_clock(model, ids):
    ticks = iter(range(100000))
    rows = list(generate.speed(model, ids, context=20, steps=3, clock=lambda: next(ticks)))
    timed = [row for row in rows if row["what"] == "speed"]
    assert [(row["tokens_per_s_low"], row["tokens_per_s"], row["p50_ms_high"]) for row in timed] == [(1, 1, 1000)] * 3
    assert [(row["cache"], row["vs_stock"]) for row in rows if row["what"] == "speed_ratio"] == [("unquantised", 1), ("block_head", 1)]
