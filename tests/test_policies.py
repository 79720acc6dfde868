"""Every policy against its NumPy twin, and what all of them promise. A new file in `pagedkv/policies` is tested by being there."""

import dataclasses
import inspect
import re

import numpy as np
import pytest
import torch
from cases import decode

import pagedkv
from pagedkv.policies import REGISTRY, Observation, Policy, mass_at_places, policy
from pagedkv.quant_spec import KV_SPECS, KVQuantSpec

LENGTHS = (400, 37, 0, 1, 16, 300)


def observed(device, cache="block_head", lengths=LENGTHS, block_size=16, steps=3, **options):
    """A decode case after some queries; the tables have garbage past the end of each sequence, and the cache poison."""
    case = decode(device, cache=cache, lengths=lengths, block_size=block_size, **options)
    total = torch.zeros(len(case.k_cache), dtype=torch.int64, device=device)
    for step in range(steps):
        case.q = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(step)).to(device)
        _, mass = case.run(return_block_mass=True)
        pagedkv.accumulate_block_mass(mass, case.block_tables, total)
    caches = {name: getattr(case, name) for name in ("k_cache", "k_scale", "v_cache", "v_scale")}
    return Observation(
        case.block_tables, case.seq_lens, block_size, **caches, block_mass=mass, total_mass=mass_at_places(total, case.block_tables)
    )


def check(rule, seen):
    scores = rule(seen)
    assert scores.dtype == torch.float32 and scores.shape == seen.block_tables.shape
    for s, sequence in enumerate(seen.sequences()):
        if sequence.length > 0:
            want = rule.reference(sequence)
            got = scores[s, : sequence.num_blocks].double().cpu().numpy()
            largest = np.abs(want[np.isfinite(want)]).max(initial=0)
            np.testing.assert_allclose(got, want, rtol=0, atol=rule.tolerance * largest, err_msg=f"sequence {s}")


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("cache", ["block_head", "token_head", "float16", "float32"])
def test_a_policy_agrees_with_its_numpy_twin(device, name, cache):
    check(policy(name), observed(device, cache))


@pytest.mark.parametrize("name", REGISTRY)
def test_other_shapes(device, name):
    check(policy(name), observed(device, block_size=5, head_dim=80, kv_heads=3, heads=6))
    check(policy(name), observed(device, lengths=(0, 0)))


@pytest.mark.parametrize("name", REGISTRY)
def test_keys_and_values_of_zeros(name):
    """They point nowhere and weigh nothing, which is no reason for a NaN."""
    seen = observed(torch.device("cpu"), "float32")
    seen.k_cache[seen.block_tables[0, 1]] = seen.v_cache[seen.block_tables[0, 1], 1] = 0
    check(policy(name), seen)
    scores = policy(name)(seen)[0]  # of a sequence that fills its row
    assert scores[1:].isfinite().all() and not scores[0].isnan(), "a sink may be worth infinity"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: policy([]), TypeError, "policy: expected a name or a Policy, got list"),
        (lambda: policy("sinks_and_recency", sink_blocks=-1), ValueError, "sink_blocks: expected at least 0 with policy"),
        (lambda: policy("lag_kv", lag_blocks=0), ValueError, "lag_blocks: expected at least 1"),
        (lambda: policy("lag_kv", lag_blocks=2.0), TypeError, "lag_blocks: expected an int, got float"),
        (lambda: policy(policy("lag_kv"), nothing=1), TypeError, "nothing"),
    ],
)
def test_parameters_are_checked_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_policy_with_other_parameters():
    assert policy(policy("lag_kv"), lag_blocks=3) == policy("lag_kv", lag_blocks=3)


def test_masses_of_other_places_are_refused(device):
    seen = observed(device)
    with pytest.raises(ValueError, match=r"^block_mass: expected shape"):
        policy("last_query_attention")(dataclasses.replace(seen, block_mass=seen.block_mass[:1]))


@pytest.mark.parametrize("name", REGISTRY)
def test_a_policy_says_what_it_is(name):
    cls = REGISTRY[name]
    assert re.search(r"arXiv:\d{4}\.\d{5}|PagedKV-Fusion", cls.__doc__), "the paper"
    assert "`" in cls.__doc__ and "score" in cls.__doc__, "the formula"
    assert dataclasses.is_dataclass(cls) and policy(name) == cls(), "every parameter has a default"
    assert set(vars(cls)) >= {"score", "reference"} and inspect.getmodule(cls).__name__ == f"pagedkv.policies.{name}"


@pytest.mark.parametrize("name", REGISTRY)
def test_a_policy_names_what_it_misses(device, name):
    seen = observed(device)
    bare = Observation(seen.block_tables, seen.seq_lens, seen.block_size)
    for field in REGISTRY[name].needs:
        with pytest.raises(ValueError, match=f"^seen: expected an observation with .*{field}"):
            policy(name)(dataclasses.replace(seen, **{field: None}))
    enough = dataclasses.replace(bare, **{field: getattr(seen, field) for field in REGISTRY[name].needs})
    enough = dataclasses.replace(enough, **{f"{x}_scale": getattr(seen, f"{x}_scale") for x in "kv" if f"{x}_cache" in policy(name).needs})
    assert policy(name)(enough).shape == seen.block_tables.shape


@pytest.mark.parametrize("spec", KV_SPECS.values(), ids=KV_SPECS)
@pytest.mark.parametrize("name", REGISTRY)
def test_an_encoding_changes_no_score_or_is_refused(name, spec):
    """K far from zero, as real ones are: what a policy says of an encoded cache is what it says of the tokens themselves."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(384, 2, 16, generator=generator) for _ in range(2))
    key *= 1 + torch.rand(384, 1, 1, generator=generator)
    key += torch.randn(2, 16, generator=generator)
    plain, cache = (
        pagedkv.PagedKVCache(30, 16, 2, 16, spec=s, dtype=None if s.quantised else torch.float32) for s in (KVQuantSpec(None), spec)
    )
    scores = []
    for each in (plain, cache):
        seq = each.allocate(k_mean=key.mean(0) if each.spec.subtract_k_mean else None)
        each.append(seq, key, value)
        seen = each.observe([seq], block_mass=torch.arange(24.0)[None], total_mass=torch.arange(24.0)[None])
        if policy(name).obstacle(each.spec) is not None:
            with pytest.raises(ValueError, match=r"^spec: expected one without (rotate|subtract_k_mean) for policy"):
                policy(name)(seen)
            return
        scores.append(policy(name)(seen))
    largest = scores[0][scores[0].isfinite()].abs().max()
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=0.03 * float(largest))


@pytest.mark.parametrize("name", REGISTRY)
def test_scores_lead_to_a_selection_that_attention_takes(device, name):
    """The lowest of the twin's scores go; what is left is a cache like any other."""
    case = decode(device, cache="block_head", lengths=LENGTHS)
    seen = observed(device)
    scores = policy(name)(seen)
    case.block_tables, case.seq_lens, _, freed = pagedkv.select_per_sequence(scores, case.block_tables, case.seq_lens, 5, block_size=16)
    assert freed.item() == 25 + 0 + 19 - 5 - 5 and case.seq_lens.tolist() == [80, 37, 0, 1, 16, 76]
    case.check()


@pytest.mark.parametrize(
    "parameters", [{"lag_blocks": 2}, {"lag_blocks": 3, "sink_blocks": 0}, {"lag_blocks": 1, "sink_blocks": 4}, {"sink_blocks": 99}]
)
def test_lags(device, parameters):
    check(policy("lag_kv", **parameters), observed(device))


def test_sinks(device):
    scores = policy("sinks_and_recency", sink_blocks=2)(observed(device))
    assert scores[0, :4].tolist() == [torch.inf, torch.inf, 2, 3]


def test_a_policy_by_name_or_as_it_is():
    rule = policy("lag_kv", lag_blocks=4)
    assert policy(rule) is rule and rule.lag_blocks == 4
    with pytest.raises(ValueError, match=r"^policy: expected one of accumulated_attention, .*, got 'h2o'"):
        policy("h2o")


def test_adding_a_policy_is_writing_one_class(device):
    """The example of the package's docstring."""

    @dataclasses.dataclass(frozen=True)
    class Age(Policy):
        """Recency alone: `score = place`."""

        name = "age"

        def score(self, seen):
            return seen.places.expand(seen.block_tables.shape).float()

        def reference(self, sequence):
            return np.arange(sequence.num_blocks, dtype=float)

    try:
        check(policy("age"), observed(device))
        with pytest.raises(ValueError, match=r"^name: expected one that no policy has, got 'age'"):
            type("Other", (Policy,), {"name": "age"})
    finally:
        del REGISTRY["age"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of CUDA only")
@pytest.mark.parametrize("name", REGISTRY)
def test_scores_in_a_cuda_graph(name):
    from test_registration import in_graph

    seen = observed(torch.device("cuda"))
    want = policy(name)(seen)
    graph, scores = in_graph(lambda: policy(name)(seen))
    graph.replay()
    torch.testing.assert_close(scores, want, rtol=0, atol=0, equal_nan=True)
