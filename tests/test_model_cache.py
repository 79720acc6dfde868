"""The cache of a whole model: every layer as if it had a `PagedKVCache` of its own."""

import pytest
import torch
from cases import same_bits

from pagedkv import KVCacheFull, PagedKVCache
from pagedkv.model_cache import ModelKVCache
from pagedkv.quant_spec import KV_SPECS

LAYERS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 3, 3, 2, 4, 8


def make(spec="block_head", **options):
    dtype = None if KV_SPECS[spec].quantised else torch.float32
    return ModelKVCache(LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM, **{"spec": spec, "dtype": dtype, **options})


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def add(cache, seqs, counts, seed=0):
    """One step; returns the output and the block mass of each layer."""
    step, out = cache.begin(seqs, counts), []
    for layer in range(LAYERS):
        key, value = (uniform(sum(counts), KV_HEADS, HEAD_DIM, seed=10 * seed + 3 * layer + i) for i in range(2))
        step.write(layer, key, value)
        out.append(step.attend(layer, uniform(sum(counts), HEADS, HEAD_DIM, seed=99), return_block_mass=True))
    step.commit()
    return out


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("spec", KV_SPECS)
def test_each_layer_is_a_paged_cache_of_its_own(spec, by_layer, plain_pytorch):
    cache = make(spec, evict_by_layer=by_layer)
    seqs = [cache.allocate(), cache.allocate()]
    add(cache, seqs, [5, 2], seed=1)
    seqs.append(cache.fork(seqs[0]))
    for layer in range(LAYERS) if by_layer else [None]:
        cache.evict(seqs[2], [0], layer)
    outputs = add(cache, seqs, [1, 1, 1], seed=2)
    for layer, (out, mass) in enumerate(outputs):
        key, value = (uniform(7, KV_HEADS, HEAD_DIM, seed=10 + 3 * layer + i) for i in range(2))
        more = [uniform(3, KV_HEADS, HEAD_DIM, seed=20 + 3 * layer + i) for i in range(2)]
        alone = PagedKVCache(20, BLOCK_SIZE, KV_HEADS, HEAD_DIM, spec=spec, dtype=cache.dtype if not cache.spec.quantised else None)
        means = [key[:5].mean(0), key[5:].mean(0)] if cache.spec.subtract_k_mean else [None, None]
        twins = [alone.allocate(k_mean=mean) for mean in means]
        alone.append([twins[0]] * 5 + [twins[1]] * 2, key, value)
        twins.append(alone.fork(twins[0]))
        alone.evict(twins[2], [0])
        alone.append(twins, *more)
        want, want_mass = alone.decode(uniform(3, HEADS, HEAD_DIM, seed=99), twins, return_block_mass=True)
        assert same_bits(out, want) and same_bits(mass, want_mass)


def test_tokens_of_one_step_see_what_came_before_them_and_not_after(plain_pytorch):
    at_once, one_by_one = make("unquantised"), make("unquantised")
    seq, twin = at_once.allocate(), one_by_one.allocate()
    (out, _), *_ = add(at_once, [seq], [7])
    step_outputs = []
    for i in range(7):
        step = one_by_one.begin([twin], [1])
        for layer in range(LAYERS):
            step.write(layer, *(uniform(7, KV_HEADS, HEAD_DIM, seed=3 * layer + j)[i : i + 1] for j in range(2)))
        step_outputs.append(step.attend(0, uniform(7, HEADS, HEAD_DIM, seed=99)[i : i + 1]))
        step.commit()
    torch.testing.assert_close(out, torch.cat(step_outputs))


def test_last_asks_for_the_last_tokens_of_each_sequence(plain_pytorch):
    cache = make()
    step = cache.begin([cache.allocate(), cache.allocate(), cache.allocate()], [4, 1, 3])
    assert step.last(2).tolist() == [2, 3, 4, 6, 7]
    step.write(0, *(uniform(8, KV_HEADS, HEAD_DIM, seed=i) for i in range(2)))
    q = uniform(8, HEADS, HEAD_DIM, seed=9)
    assert same_bits(step.attend(0, q[step.last(2)], last=2), step.attend(0, q)[step.last(2)])


def test_a_layer_evicts_for_itself_where_it_has_its_own_tables(plain_pytorch):
    cache = make("unquantised", evict_by_layer=True)
    seq = cache.allocate()
    add(cache, [seq], [8])
    cache.evict(seq, [0, 1], 1)
    assert [cache.length(seq, layer) for layer in range(LAYERS)] == [8, 2, 8]
    add(cache, [seq], [4])
    assert [cache.length(seq, layer) for layer in range(LAYERS)] == [12, 6, 12]
    with pytest.raises(ValueError, match="layer: expected a layer"):
        cache.evict(seq, [0])


@pytest.mark.parametrize("spec", KV_SPECS)
def test_writing_builds_no_graph(spec, plain_pytorch):
    cache = make(spec)
    step = cache.begin([cache.allocate(), cache.allocate()], [3, 1])
    for layer in range(LAYERS):
        step.write(layer, *(uniform(4, KV_HEADS, HEAD_DIM, seed=i).requires_grad_() for i in range(2)))
        assert not step.attend(layer, uniform(4, HEADS, HEAD_DIM)).requires_grad
    step.commit()
    assert not any(plane.requires_grad for planes in cache.planes for plane in planes.tensors().values())


@pytest.mark.parametrize("spec", KV_SPECS)
def test_no_call_reads_the_device(spec):
    """On the meta device there is nothing to read, and reading raises."""
    cache = make(spec, device="meta")
    seqs = [cache.allocate(), cache.allocate()]
    for counts in ([5, 2], [1, 1], [0, 3]):
        step = cache.begin(seqs, counts)
        for layer in range(LAYERS):
            step.write(layer, *torch.empty(2, sum(counts), KV_HEADS, HEAD_DIM, device="meta"))
            step.attend(layer, torch.empty(sum(counts), HEADS, HEAD_DIM, device="meta"), return_block_mass=True)
            step.attend(layer, torch.empty(len(step.last(2)), HEADS, HEAD_DIM, device="meta"), last=2)
        step.commit()
        seqs = [cache.fork(seq) for seq in seqs]
    cache.evict(seqs[0], [0])
    cache.free(seqs[1])


def test_the_pool_grows_unless_its_size_is_given(plain_pytorch):
    growing, fixed = make(), make(num_blocks=3)
    for cache in (growing, fixed):
        seq = cache.allocate()
        add(cache, [seq], [9])
    before = growing.bytes_in_use()
    (out, _), *_ = add(growing, [seq], [8], seed=1)
    assert out.isfinite().all() and growing.length(seq) == 17 and growing.bytes_in_use() == 2 * before
    with pytest.raises(KVCacheFull):
        add(fixed, [seq], [1])
    assert fixed.length(seq) == 9


def test_a_step_that_is_not_committed_leaves_the_sequences_as_they_were(plain_pytorch):
    cache, untouched = make("token_head"), make("token_head")
    for each in (cache, untouched):
        add(each, [each.allocate()], [4])
    step = cache.begin([0], [5])
    step.write(0, *(uniform(5, KV_HEADS, HEAD_DIM, seed=i) for i in range(2)))
    assert cache.length(0) == 4
    assert same_bits(add(cache, [0], [1], seed=3)[1][0], add(untouched, [0], [1], seed=3)[1][0])
