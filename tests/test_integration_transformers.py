"""transformers' `generate` on a `PagedCache`: unquantised, it says what the stock cache says, token for token. Tiny random models."""

import subprocess
import sys

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from pagedkv import KVCacheFull  # noqa: E402
from pagedkv.block_mass import BlockMass  # noqa: E402
from pagedkv.integrations.transformers import PagedCache  # noqa: E402
from pagedkv.policies import REGISTRY, Observation  # noqa: E402
from pagedkv.quant_spec import KV_SPECS  # noqa: E402

transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

VOCABULARY = 97
MODELS = {
    "llama": (transformers.LlamaConfig, {"head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 24}),
    "mistral_window": (transformers.MistralConfig, {"head_dim": 16, "sliding_window": 12}),
    "qwen2_window_in_some_layers": (transformers.Qwen2Config, {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
}


def tiny(name="llama", **changes):
    config, options = MODELS[name]
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    # Wide weights, or every continuation is one token repeated.
    config = config(vocab_size=VOCABULARY, max_position_embeddings=4096, initializer_range=0.3, **{**sizes, **ends, **options, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompt(padding, batch=3, length=20):
    ids = torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding != "none":
        where = slice(0, 7) if padding == "left" else slice(-7, None)
        ids[1, where] = mask[1, where] = 0
    return {"input_ids": ids, "attention_mask": mask}


def stock(model, inputs, **options):
    model.set_attn_implementation("sdpa")
    return model.generate(**inputs, **{"max_new_tokens": 16, "do_sample": False, **options})


def paged(model, inputs, cache, **options):
    return model.generate(**inputs, past_key_values=cache, **{"max_new_tokens": 16, "do_sample": False, **options})


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_an_unquantised_paged_cache_generates_what_the_stock_cache_does(name, padding, beams, backend):
    if "window" in name and padding == "right":
        pytest.skip("a stock window counts columns, padding among them; this one counts tokens")
    model, inputs = tiny(name), prompt(padding)
    want = stock(model, inputs, num_beams=beams)
    cache = PagedCache(model, "unquantised", block_size=5)
    assert torch.equal(paged(model, inputs, cache, num_beams=beams), want)
    if beams == 1:  # the last token generated is not fed back
        assert [cache.kv.length(seq) for seq in cache.seqs] == [35, 35 if padding == "none" else 28, 35], "padding is not stored"


def test_a_long_prompt_and_a_second_turn(backend):
    model = tiny()
    first = {"input_ids": prompt("none", batch=1, length=1030)["input_ids"]}
    want = stock(model, first, max_new_tokens=8)
    cache = PagedCache(model, "unquantised")
    got = paged(model, first, cache, max_new_tokens=8)
    assert torch.equal(got, want)
    turn = torch.cat([want, prompt("none", batch=1, length=9)["input_ids"]], 1)
    assert torch.equal(paged(model, {"input_ids": turn}, cache, max_new_tokens=8), stock(model, {"input_ids": turn}, max_new_tokens=8))


@pytest.mark.parametrize("spec", [name for name, spec in KV_SPECS.items() if spec.quantised])
def test_next_token_probabilities_over_an_encoded_cache_are_close(spec, plain_pytorch):
    model, inputs = tiny(), prompt("left")
    following = torch.randint(2, VOCABULARY, (3, 1), generator=torch.Generator().manual_seed(2))
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.int64)], 1)
    logits = {}
    for encoding in ("unquantised", spec):
        cache = PagedCache(model, encoding, block_size=4)
        with torch.inference_mode():
            model(**inputs, past_key_values=cache)
            logits[encoding] = model(following, attention_mask=mask, past_key_values=cache).logits.log_softmax(-1)
    assert 0 < (logits[spec] - logits["unquantised"]).abs().max() < 0.5


def test_the_prompt_is_exact_whatever_the_encoding(plain_pytorch):
    model, inputs = tiny(), prompt("left")
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        want = model(**inputs).logits
        assert torch.equal(model(**inputs, past_key_values=PagedCache(model, "block_head")).logits, want)


def test_without_a_paged_cache_the_attention_is_stock(plain_pytorch):
    model, inputs = tiny(), prompt("left")
    want = stock(model, inputs)
    PagedCache(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False), want)


# ---------------------------------------------------------------------------------------------------------------------- eviction


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
def test_a_policy_in_the_loop_keeps_every_sequence_within_its_budget(by_layer, beams, plain_pytorch):
    model, inputs = tiny(), prompt("left")
    cache = PagedCache(model, "block_head", block_size=4, policy="accumulated_attention", budget=16, watch=8, evict_by_layer=by_layer)
    paged(model, inputs, cache, num_beams=beams)
    for layer in range(3):
        lengths = [cache.kv.length(seq, layer) for seq in cache.seqs]
        assert all(12 < length <= 16 for length in lengths), lengths
    blocks = {pool.num_blocks - pool.num_free_blocks for pool in cache.kv.pools}
    assert max(blocks) <= 4 * len(cache.seqs)


@pytest.mark.parametrize("policy", REGISTRY)
def test_every_policy_runs_in_the_loop(policy, plain_pytorch):
    model, inputs = tiny(), prompt("left")
    cache = PagedCache(model, "block_head", block_size=4, policy=policy, budget=16)
    paged(model, inputs, cache, max_new_tokens=4)
    assert all(12 < cache.kv.length(seq) <= 16 for seq in cache.seqs)
    assert cache.scores(cache.policy).shape == (3, 4)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("policy", REGISTRY)
def test_the_blocks_that_remain_are_worth_most(policy, by_layer, plain_pytorch):
    """Step by step beside a cache that evicts nothing by itself, but is told to what the policy's NumPy twin gives up."""
    model, inputs = tiny(), prompt("left", length=40)
    options = {"block_size": 4, "policy": policy, "evict_by_layer": by_layer, "watch": 8}
    cache, twin = PagedCache(model, "block_head", budget=16, **options), PagedCache(model, "block_head", budget=1000, **options)
    ids, mask, gone = inputs["input_ids"], inputs["attention_mask"], 0
    for step in range(9):
        with torch.no_grad():
            logits = [model(ids, attention_mask=mask, past_key_values=each).logits for each in (cache, twin)]
        assert torch.equal(*logits), step
        for table in range(3 if by_layer else 1):
            for row, scores in enumerate(twin_scores(twin, table)):
                length = twin.kv.length(twin.seqs[row], table)
                evictable = range(1, (length - 1) // 4)
                lowest = sorted(evictable, key=scores.__getitem__)[: max(0, -(-(length - 16) // 4))]
                gone += len(lowest)
                if lowest:
                    twin.evict(row, lowest, table)
            assert torch.equal(cache.kv.tables(cache.seqs, table)[0], twin.kv.tables(twin.seqs, table)[0]), (step, table)
        ids = logits[0][:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
    assert gone == (6 + 5 + 6 + 3 * 2) * (3 if by_layer else 1), "after the prompt, and whenever a block has filled up"


def twin_scores(cache, table):
    """For each row the policy's `reference` of its blocks; where one table serves all layers, the mean over them."""
    layers = [table] if cache.evict_by_layer else range(3)
    mass = cache.mass[table]
    seen = [
        Observation(
            *cache.kv.tables(cache.seqs, table),
            4,
            **cache.kv.planes[layer].tensors(),
            block_mass=mass.last / len(layers),
            total_mass=mass.total / len(layers),
        )
        for layer in layers
    ]
    return [np.mean([cache.policy.reference(each) for each in row], 0) for row in zip(*(x.sequences() for x in seen), strict=True)]


def test_mass_goes_with_its_rows_and_blocks():
    mass, rows = BlockMass(), torch.tensor([0, 0, 1, 1, 1])
    mass.begin(2, 5, torch.device("cpu"))
    given = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) + 1
    mass.add(given, rows)
    assert mass.total.numel() == 0, "nothing counts until the step does"
    mass.commit()
    want = {"total": torch.stack([given[:2].sum(0), given[2:].sum(0)]), "last": given[[1, 4]]}
    for name in want:
        torch.testing.assert_close(getattr(mass, name), want[name])
    mass.choose([1, 0, 1])
    mass.evict(2, [3, 0])
    for name, (first, second) in want.items():
        left = torch.cat([second[[1, 2, 4]], torch.zeros(2)])  # later ones have moved up
        torch.testing.assert_close(getattr(mass, name), torch.stack([second, first, left]))


@pytest.mark.parametrize("by_layer", [False, True])
def test_mass_follows_beams_and_eviction(by_layer, plain_pytorch):
    model, inputs = tiny(), prompt("left")
    cache = PagedCache(model, "unquantised", block_size=4, policy="accumulated_attention", budget=100, evict_by_layer=by_layer)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)

    def held():
        return [(cache.kv.tables(cache.seqs, i)[0], mass.total, mass.last) for i, mass in enumerate(cache.mass)]

    def expect(rows):
        for got, want in zip(held(), before, strict=True):
            assert all(torch.equal(x, y[rows]) for x, y in zip(got, want, strict=True))

    before = held()
    assert all(len(set(x[:, 0].tolist())) == 3 for tensors in before for x in tensors), "rows differ, or nothing is shown"
    cache.batch_repeat_interleave(2)
    expect([0, 0, 1, 1, 2, 2])
    cache.reorder_cache(torch.tensor([5, 0, 0, 2, 3, 4]))
    expect([2, 0, 0, 1, 1, 2])
    cache.batch_select_indices(torch.tensor([1, 3, 5]))
    expect([0, 1, 2])
    for table in range(len(cache.mass)):
        cache.evict(1, [2, 1], table)
    for (tables, *masses), (tables_before, *masses_before) in zip(held(), before, strict=True):
        assert torch.equal(tables[1, :2], tables_before[1, [0, 3]]) and torch.equal(tables[::2], tables_before[::2])
        for got, want in zip(masses, masses_before, strict=True):
            assert torch.equal(got[::2], want[::2]), "other rows"
            assert torch.equal(got[1], torch.cat([want[1, [0, 3, 4]], torch.zeros(2)]))


@pytest.mark.parametrize("policy", [None, *REGISTRY])
def test_any_sequence_of_forwards_is_stock_attention_without_what_was_evicted(policy, plain_pytorch):
    """Padding anywhere in a part, rows that fork and go, blocks evicted: the stock cache with a mask that hides them says the same."""
    draw = np.random.default_rng(0)
    for name in ("llama", "qwen2", "qwen3"):
        model, ours = tiny(name), tiny(name)
        model.set_attn_implementation("sdpa")
        stock_cache, size = transformers.DynamicCache(config=model.config), int(draw.integers(1, 6))
        limits = {} if policy is None else {"policy": policy, "budget": int(draw.integers(1, 20)), "watch": 4}
        cache = PagedCache(ours, "unquantised", block_size=size, **limits)
        gone = []
        evict = cache.evict
        cache.evict = lambda row, blocks, table=0, evict=evict, gone=gone: (gone.append((row, set(blocks))), evict(row, blocks, table))
        mask, kept = torch.zeros(3, 0, dtype=torch.int64), [[], [], []]  # kept: of each row, the columns that are still held
        for step in range(10):
            past, columns = mask.shape[1], 20 if step == 0 else int(draw.integers(1, 5))
            ids = torch.from_numpy(draw.integers(2, VOCABULARY, (3, columns)))
            valid = torch.from_numpy(draw.random((3, columns)) < 0.8).long()
            mask = torch.cat([mask, valid], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
            seen = torch.zeros(3, 1, columns, past + columns, dtype=torch.bool)
            seen[..., past:] = torch.ones(columns, columns).tril().bool() & valid.bool()[:, None, None]
            for row, held in enumerate(kept):
                seen[row, :, :, held] = True
            with torch.inference_mode():
                want = model(ids, attention_mask=seen, position_ids=positions, past_key_values=stock_cache).logits
                got = ours(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            torch.testing.assert_close(got[valid.bool()], want[valid.bool()], rtol=1e-3, atol=1e-3)
            kept = [[*held, *(past + valid[row].nonzero()[:, 0]).tolist()] for row, held in enumerate(kept)]
            for row, blocks in gone:
                kept[row] = [column for i, column in enumerate(kept[row]) if i // size not in blocks]
            gone.clear()
            if step % 3 == 2:
                rows = torch.from_numpy(draw.integers(0, 3, 3))
                stock_cache.reorder_cache(rows)
                cache.reorder_cache(rows)
                mask, kept = mask[rows], [list(kept[row]) for row in rows]
            assert [cache.kv.length(seq) for seq in cache.seqs] == [len(held) for held in kept]
        evicted = any(len(held) < int(mask[row].sum()) for row, held in enumerate(kept))
        assert evicted == (policy is not None)


def test_a_budget_that_is_never_reached_changes_nothing(plain_pytorch):
    model, inputs = tiny(), prompt("right")
    cache = PagedCache(model, "unquantised", block_size=4, policy="accumulated_attention", budget=44)
    assert torch.equal(paged(model, inputs, cache), stock(model, inputs))


def test_mass_is_that_of_the_queries_that_were_watched(plain_pytorch):
    model, inputs = tiny(), prompt("left")
    cache = PagedCache(model, "unquantised", block_size=4, policy="accumulated_attention", budget=100, watch=8)
    model(**inputs, past_key_values=cache)
    (mass,) = cache.mass
    torch.testing.assert_close(mass.total.sum(1), torch.full((3,), 3 * 8.0))  # layers * queries; each gives away 1
    torch.testing.assert_close(mass.last.sum(1), torch.full((3,), 3.0))
    assert mass.total[1, 4:].sum() == 0, "13 tokens are 4 blocks"
    weights = stock_attention(model, inputs)  # [layers, batch, heads, queries, keys]
    want = weights[:, 0, :, -8:].mean(1).sum((0, 1)).view(5, 4).sum(1)
    torch.testing.assert_close(mass.total[0], want)


def stock_attention(model, inputs):
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return torch.stack(model(**inputs, output_attentions=True).attentions)


# ---------------------------------------------------------------------------------------------------------------------- refusals


def test_what_it_cannot_do_is_said(plain_pytorch):
    model, inputs = tiny(), prompt("none")
    with pytest.raises(ValueError, match="budget: expected a number of tokens with a policy"):
        PagedCache(model, policy="accumulated_attention")
    with pytest.raises(ValueError, match="spec: expected one of"):
        PagedCache(model, "int5")
    cache = PagedCache(model, num_blocks=4)
    with pytest.raises(KVCacheFull):
        paged(model, inputs, cache)
    cache = PagedCache(model)
    with pytest.raises(RuntimeError, match="nothing has been stored yet"):
        _ = cache.kv
    model(**inputs, past_key_values=cache)
    with pytest.raises(ValueError, match="batch: expected 3 rows, as in the prompt, got 1"):
        model(inputs["input_ids"][:1, :1], past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot take tokens back"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="training"):
        model.train()(**inputs, past_key_values=PagedCache(model))


def test_another_attention_than_this_one_is_noticed(plain_pytorch):
    model, inputs = tiny(), prompt("none")
    cache = PagedCache(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="the model's attention is no longer 'pagedkv'"):
        paged(model, inputs, cache)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_is_usable_again_once_the_attention_is(layers, plain_pytorch):
    model, inputs = tiny(num_hidden_layers=layers), prompt("none")["input_ids"]
    cache, following = PagedCache(model, "unquantised"), inputs[:, :1]
    with torch.inference_mode():
        first = model(inputs, past_key_values=cache).logits
        model.set_attn_implementation("sdpa")
        if layers == 1:  # no second layer to see it: the next forward does
            model(following, past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"layer 0 were not stored.*set_attn_implementation\('pagedkv'\) and repeat the forward"):
            model(following, past_key_values=cache)
        model.set_attn_implementation("pagedkv")
        got = model(following, past_key_values=cache).logits
        torch.testing.assert_close(got, model(torch.cat([inputs, following], 1)).logits[:, -1:])

        model.set_attn_implementation("sdpa")
        if layers == 1:
            model(following, past_key_values=cache)
        else:
            with pytest.raises(RuntimeError, match="layer 0 were not stored"):
                model(following, past_key_values=cache)
        cache.reset()
        model.set_attn_implementation("pagedkv")
        assert torch.equal(model(inputs, past_key_values=cache).logits, first)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "key_norm", "budget": -5}, ValueError, "budget: expected at least 1, got -5"),
        ({"policy": "key_norm", "budget": 0}, ValueError, "budget: expected at least 1, got 0"),
        ({"policy": "key_norm", "budget": 8.5}, TypeError, "budget: expected an int, got float"),
        ({"policy": "key_norm", "budget": "x"}, TypeError, "budget: expected an int, got str"),
        ({"watch": -1}, ValueError, "watch: expected at least 0, got -1"),
        ({"watch": 2.5}, TypeError, "watch: expected an int, got float"),
        ({"policy": "accumulated_attention", "budget": 8, "watch": 0}, ValueError, "watch: expected at least 1 with policy 'accumulated"),
        ({"block_size": 0}, ValueError, "block_size: expected at least 1, got 0"),
        ({"block_size": "16"}, TypeError, "block_size: expected an int, got str"),
        ({"num_blocks": -1}, ValueError, "num_blocks: expected at least 1, got -1"),
        ({"policy": "last_query_attention", "budget": 8, "watch": 0}, ValueError, "watch: expected at least 1 with policy 'last_query"),
    ],
)
def test_budget_and_watch_are_checked_at_once(arguments, error, message):
    model = tiny()
    attention = model.config._attn_implementation
    with pytest.raises(error, match=message):
        PagedCache(model, **arguments)
    assert model.config._attn_implementation == attention, "a cache that was not made leaves the model as it was"


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layers of chunked_attention"),  # Llama 4
        ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "layers of linear_attention"),  # Qwen3-Next
        ({"num_kv_shared_layers": 1}, "layers that share the K and V of others"),  # Gemma 3n
    ],
)
def test_a_model_that_it_would_be_wrong_for_is_refused_by_name(config, what):
    model = tiny()
    for name, value in config.items():
        setattr(model.config, name, value)
    attention = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=f"^PagedCache: {what}"):
        PagedCache(model)
    assert model.config._attn_implementation == attention


def test_a_model_whose_attention_is_its_own_is_refused_by_name(monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM, whose attention does not go through"):
        PagedCache(model)
    with pytest.raises(TypeError, match=r"^model: expected a model of transformers, got str"):
        PagedCache("block_head")


@pytest.mark.parametrize("policy", REGISTRY)
def test_a_policy_that_would_see_what_the_encoding_does_is_refused(policy, plain_pytorch):
    model, refused = tiny(), set()
    for spec in KV_SPECS:
        try:
            PagedCache(model, spec, policy=policy, budget=16)
        except ValueError as error:
            assert str(error).startswith("spec: expected one without ") and f"for policy {policy!r}" in str(error)
            refused.add(spec)
    rotated, k_mean = ({name for name in KV_SPECS if word in name} for word in ("rotated", "k_mean"))
    by_channel, by_key = {"lag_kv"}, {"key_diff", "key_norm", "value_key_norm"}
    assert refused == (rotated if policy in by_channel else k_mean if policy in by_key else set())
    cache = PagedCache(model, "k_mean_rotated_block_head", watch=8)
    model(**prompt("none"), past_key_values=cache)
    if policy in by_channel | by_key:
        with pytest.raises(ValueError, match=r"^spec: expected one without"):
            cache.scores(REGISTRY[policy]())
    else:
        assert cache.scores(REGISTRY[policy]()).shape == (3, 2)


def test_a_mask_of_one_row_is_that_of_all(plain_pytorch):
    model, ids = tiny(), prompt("none")["input_ids"]
    allowed = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    allowed[..., :4] = False  # padding, left
    cache = PagedCache(model, "unquantised")
    with torch.inference_mode():
        got = model(ids, attention_mask=allowed, past_key_values=cache).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(got[:, 4:], model(ids, attention_mask=allowed).logits[:, 4:])
    assert [cache.kv.length(seq) for seq in cache.seqs] == [16, 16, 16]


def test_a_mask_of_another_batch_is_refused_before_anything_is_held(plain_pytorch):
    model, ids = tiny(), prompt("none")["input_ids"]
    cache, mask = PagedCache(model, "unquantised"), torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"^attention_mask: expected 3 rows, as in the batch, or 1, got 2"):
        model(ids, attention_mask=mask, past_key_values=cache)
    assert cache.seqs == []
    with torch.inference_mode():
        assert model(ids, past_key_values=cache).logits.isfinite().all(), "and it may be used"


@pytest.mark.parametrize("spec", ["unquantised", "k_mean_rotated_block_head"])
def test_a_forward_with_gradients_leaves_none_in_the_cache(spec, plain_pytorch):
    model, inputs = tiny(), prompt("left")
    cache = PagedCache(model, spec, block_size=4, watch=8)
    model(**inputs, past_key_values=cache)
    model(inputs["input_ids"][:, :1], past_key_values=cache)
    held = [plane for planes in cache.kv.planes for plane in planes.tensors().values()] + [cache.mass[0].total, cache.mass[0].last]
    assert not any(tensor.requires_grad for tensor in held)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("spec", ["block_head", "k_mean_rotated_token_head"])
def test_a_forward_that_failed_midway_leaves_no_trace(spec, by_layer, plain_pytorch):
    model, inputs = tiny(), prompt("left")
    options = {"block_size": 4, "policy": "accumulated_attention", "budget": 100, "evict_by_layer": by_layer}
    cache, untouched = PagedCache(model, spec, **options), PagedCache(model, spec, **options)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.int64)], 1)
    steps = [inputs, {"input_ids": inputs["input_ids"][:, -1:], "attention_mask": mask}]

    def fail(*_):
        raise MemoryError

    for step in steps:
        middle = model.model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(MemoryError), torch.no_grad():
            model(**step | {"input_ids": step["input_ids"].flip(0, 1)}, past_key_values=cache)
        middle.remove()
        with torch.no_grad():
            got, want = (model(**step, past_key_values=each).logits for each in (cache, untouched))
        assert torch.equal(got, want)
        for mine, other in zip(cache.mass, untouched.mass, strict=True):
            assert torch.equal(mine.total, other.total) and torch.equal(mine.last, other.last)


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_window_in_some_layers"])
def test_a_policy_over_a_sliding_window_is_refused(name):
    """What is evicted would bring tokens back into the window, which counts those that are left."""
    model = tiny(name)
    attention = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=r"^PagedCache: a policy over sliding-window layers"):
        PagedCache(model, policy="sinks_and_recency", budget=16)
    assert model.config._attn_implementation == attention
    unused = tiny("qwen2_window_in_some_layers", use_sliding_window=False), tiny("mistral_window", sliding_window=None)
    assert all(PagedCache(model, policy="sinks_and_recency", budget=16) for model in unused)


def test_a_mask_that_adds_to_logits_is_refused(plain_pytorch):
    model, ids = tiny(), prompt("none")["input_ids"]
    mask = torch.zeros(3, 1, 20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    want = model(ids, past_key_values=PagedCache(model, "unquantised")).logits
    torch.testing.assert_close(model(ids, attention_mask=mask, past_key_values=PagedCache(model, "unquantised")).logits, want)
    mask[0, 0, 5, 2] = -1.5
    with pytest.raises(NotImplementedError, match="attention mask that adds to logits"):
        model(ids, attention_mask=mask, past_key_values=PagedCache(model, "unquantised"))


def test_a_cache_of_another_model_is_refused(plain_pytorch):
    model, smaller = tiny(), tiny(num_hidden_layers=2)
    cache = PagedCache(model)
    smaller.set_attn_implementation("pagedkv")
    with pytest.raises(ValueError, match=r"^past_key_values: expected a PagedCache of 2 layers, got one that was made for 3"):
        smaller(**prompt("none"), past_key_values=cache)


def test_its_sizes_are_those_that_transformers_asks_for(plain_pytorch):
    model = tiny()
    cache = PagedCache(model)
    layer = cache.layers[0]  # older versions ask the cache, and that asks its layers
    assert (layer.max_batch_size, layer.get_max_cache_shape()) == (-1, -1), "any batch until there is a prompt; it grows"
    model(**prompt("none"), past_key_values=cache)
    assert layer.max_batch_size == 3
    cache.reset()
    assert layer.max_batch_size == -1


def test_the_library_does_not_need_transformers():
    code = "import sys; sys.modules['transformers'] = None; import pagedkv, pagedkv.model_cache, pagedkv.integrations"
    subprocess.run([sys.executable, "-c", code], check=True)
