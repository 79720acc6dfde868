"""The ops as torch sees them: schemas, fake kernels, torch.compile, CUDA graphs, streams and devices."""

import pytest
import torch
from cases import decode, same_bits
from test_arguments import INTS, OPS, valid
from test_eviction import statistics
from torch.autograd import forward_ad

import pagedkv
from pagedkv.ops import build

pytestmark = pytest.mark.xdist_group("torch.compile")  # one worker: what it imports at first use takes seconds


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test compiles for itself; the limit of recompilations is per process."""
    torch.compiler.reset()


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def examples(op: str, device) -> list[tuple[tuple, dict]]:
    """Several calls of each op: granularities, options, layouts, empty results."""
    if op in ("quant_paged_attention", "paged_attention"):
        caches = ("block_head", "token_head") if op == "quant_paged_attention" else ("float16", "float32")
        plain = decode(device, cache=caches[0])
        loaded = decode(device, cache=caches[1], layout="sliced", window=9, cap=5.0, sinks=True)
        with_flags = [(plain, {}), (plain, {"return_lse": True}), (loaded, {"rotated": True})]
        with_flags.append((loaded, {"return_lse": True, "return_block_mass": True}))
        return [(case.arguments, {**case.options, **flags}) for case, flags in with_flags]
    if op in ("quantize_kv", "dequantize_kv"):
        kv = torch.randn(3, 5, 2, 24, device=device)
        encoded = [(kv, granularity) for granularity in ("block_head", "token_head")]
        if op == "dequantize_kv":
            return [(torch.ops.pagedkv.quantize_kv(*e), {}) for e in encoded]
        return [(e, {"rotated": rotated}) for e in encoded for rotated in (False, True)]
    if op == "reshape_and_cache":
        k, v = (torch.zeros(3, 4, 2, 16, dtype=torch.int8, device=device) for _ in range(2))
        new = torch.randn(5, 2, 16, device=device)
        slots = torch.tensor([0, 1, 9, -1, 2], device=device)
        shapes = ((3, 2), (3, 4, 2))
        scales = [[torch.ones(s, device=device) for _ in range(2)] for s in shapes]
        return [((new, new * 2, k, ks, v, vs, slots), {"rotated": r}) for ks, vs in scales for r in (False, True)]
    if op == "merge_attention_states":
        state = torch.randn(3, 2, 8, device=device), torch.randn(3, 2, device=device)
        return [((*state, *state), {})]
    if op in ("accumulate_block_mass", "select_per_sequence", "token_moments", "channel_statistics"):
        arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in valid(op).items()}
        if op != "select_per_sequence":
            return [((), arguments)]
        arguments["references"] += 1000  # lowered by each call, never to 0: every call returns the same
        return [((), arguments), ((), {**arguments, "scores": torch.rand(3, 4, device=device), "references": None})]
    if op == "select_eviction_candidates":
        return [((torch.randn(50, device=device), k), {}) for k in (0, 7, 50)]
    return [((*statistics(device, 20, 16), *((k,) if op == "evict_blocks" else ())), {}) for k in (0, 7)]


@pytest.mark.parametrize("op", OPS)
def test_opcheck(device, op):
    for args, kwargs in examples(op, device):
        torch.library.opcheck(getattr(torch.ops.pagedkv, op).default, args, kwargs, test_utils=OPCHECKS)


@pytest.mark.parametrize("op", OPS)
def test_fake_results_look_like_real_ones(device, op):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for args, kwargs in examples(op, device):
        real = getattr(torch.ops.pagedkv, op)(*args, **kwargs)
        with FakeTensorMode() as mode:

            def faked(x, mode=mode):
                return mode.from_tensor(x) if isinstance(x, torch.Tensor) else x

            fake = getattr(torch.ops.pagedkv, op)(*map(faked, args), **{k: faked(v) for k, v in kwargs.items()})
        for r, f in zip(*(x if isinstance(x, tuple) else (x,) for x in (real, fake)), strict=True):
            if r is not None:
                assert (f.shape, f.dtype, f.device, f.stride()) == (r.shape, r.dtype, r.device, r.stride())


@pytest.mark.parametrize("op", OPS)
def test_meta_tensors(plain_pytorch, op):
    arguments = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in valid(op).items()}
    results = getattr(pagedkv, op)(**arguments)
    for result in results if isinstance(results, tuple) else [results] * (results is not None):
        assert result.device.type == "meta"


@pytest.mark.parametrize("op", OPS)
def test_compiles_without_graph_breaks(device, op):
    face = getattr(pagedkv, op)
    compiled = torch.compile(face, fullgraph=True, backend="aot_eager")
    for args, kwargs in examples(op, device):
        expected = face(*args, **kwargs)
        results = compiled(*args, **kwargs)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, results)), strict=True):
            assert a is b is None or same_bits(a, b)


def test_compiles_with_shapes_that_change(device):
    compiled = torch.compile(pagedkv.quant_paged_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_seqs, block_size in ((2, 16), (5, 16), (7, 12)):
        case = decode(device, lengths=tuple(range(3, 3 + num_seqs)), block_size=block_size)
        assert same_bits(compiled(*case.arguments), case.run())


def test_compiles_with_numbers_that_change(device):
    compiled = torch.compile(pagedkv.quant_paged_attention, fullgraph=True, backend="aot_eager")
    case = decode(device)
    for sm_scale, window in ((0.1, 5), (0.2, 6), (0.3, 7)):
        case.sm_scale, case.options["sliding_window"] = sm_scale, window
        assert same_bits(compiled(*case.arguments, **case.options), case.run())


@pytest.mark.parametrize("op, name", INTS)
def test_compiles_with_integers_that_only_the_run_knows(plain_pytorch, op, name):
    def call(mask, arguments):
        return getattr(pagedkv, op)(**arguments | {name: mask.sum().item()})

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = torch.compile(call, fullgraph=True, backend="aot_eager")
        for number in (3, 2):
            mask = torch.arange(5) < number
            torch.manual_seed(0)
            expected = call(mask, valid(op))
            torch.manual_seed(0)
            results = graph(mask, valid(op))
            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, results)), strict=True):
                torch.testing.assert_close(a, b)
        if name not in ("k", "budget", "protect_first", "protect_last"):  # of which 0 is one
            with pytest.raises(ValueError, match=f"^{name}: expected .*, got 0$"):
                graph(torch.zeros(5, dtype=torch.bool), valid(op))


def test_compiles_with_sizes_that_only_the_run_knows(plain_pytorch):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = torch.compile(lambda x, mask: pagedkv.select_eviction_candidates(x[mask], 2), fullgraph=True, backend="aot_eager")
        assert graph(torch.tensor([3.0, 1.0, 0.0, 2.0]), torch.tensor([True, True, False, True])).tolist() == [1, 2]


@pytest.mark.parametrize("op, name", INTS)
def test_a_compiled_call_names_what_is_wrong_with_an_integer(plain_pytorch, op, name):
    for value in (-1, 2**63, 1.5, "3"):
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match=f"{name}: expected "):  # what the compiler makes of errors
            torch.compile(getattr(pagedkv, op), fullgraph=True, backend="aot_eager")(**valid(op) | {name: value})


def test_a_decode_step_compiles_as_a_whole(device):
    """Write, attend, score and evict in one graph; the cache is mutated in place, K and V in one tensor."""

    def step(kv, k_scale, v_scale, new, slots, tables, lengths, recency, frequency, mass, mask):
        k_cache, v_cache = kv[:, 0], kv[:, 1]
        pagedkv.reshape_and_cache(new, new * 2, k_cache, k_scale, v_cache, v_scale, slots)
        out = pagedkv.quant_paged_attention(new.repeat(1, 2, 1), k_cache, k_scale, v_cache, v_scale, tables, lengths, 0.25)
        ids, _ = pagedkv.evict_blocks(recency, frequency, mass, mask, 3)
        return out * 2, ids

    def arguments():
        rng = torch.Generator().manual_seed(0)
        kv = torch.zeros(6, 2, 4, 2, 16, dtype=torch.int8, device=device)
        scales = [torch.ones(6, 2, device=device) for _ in range(2)]
        tables = torch.tensor([[1, 0], [2, 0], [4, 0]], dtype=torch.int32, device=device)
        lengths = torch.ones(3, dtype=torch.int32, device=device)
        new = torch.randn(3, 2, 16, generator=rng).to(device)
        return kv, *scales, new, torch.tensor([4, 8, 16], device=device), tables, lengths, *statistics(device, 6, 4)

    plain, compiled = arguments(), arguments()
    expected = step(*plain)
    results = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    assert all(same_bits(a, b) for a, b in zip(expected, results, strict=True))
    assert all(same_bits(a, b) for a, b in zip(plain[:3], compiled[:3], strict=True)), "the cache was not mutated alike"


INTEGER_RESULTS = {"select_eviction_candidates", "select_per_sequence", "accumulate_block_mass"}


def differentiable(op: str) -> dict:
    arguments = {k: v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in valid(op).items()}
    if op == "reshape_and_cache":  # torch itself refuses to write to a leaf that requires a gradient
        arguments |= {name: arguments[name].detach() for name in ("k_scale", "v_scale")}
    return arguments


def results_of(op: str, compiled: bool, arguments: dict) -> list[torch.Tensor]:
    """What an op returns or writes."""
    call = torch.compile(getattr(pagedkv, op), fullgraph=True, backend="aot_eager") if compiled else getattr(pagedkv, op)
    results = call(**arguments)
    if results is None:
        results = (arguments["total"],) if op == "accumulate_block_mass" else (arguments["k_scale"], arguments["v_scale"])
    return list(results) if isinstance(results, tuple) else [results]


@pytest.mark.parametrize("op", sorted(set(OPS) - INTEGER_RESULTS))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_backward_pass_raises(device, op, compiled):
    """torch alone would warn at most, and train on with gradients missing."""
    arguments = {
        k: v.detach().to(device).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for k, v in differentiable(op).items()
    }
    marked = [r for r in results_of(op, compiled, arguments) if r.is_floating_point() and r.numel() > 0]
    assert marked
    for result in marked:
        with pytest.raises(NotImplementedError, match=f"^pagedkv.{op} has no gradient"):
            result.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not any(r.requires_grad for r in results_of(op, compiled, {k: getattr(v, "data", v) for k, v in arguments.items()}))


@pytest.mark.parametrize("op", sorted(INTEGER_RESULTS))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_integer_results_ask_for_no_gradient(plain_pytorch, op, compiled):
    assert not any(r.requires_grad for r in results_of(op, compiled, differentiable(op)))


def test_scales_that_lie_in_one_tensor_are_marked_too(device):
    both = torch.ones(3, 2, 2, device=device)
    arguments = {k: v.to(device) for k, v in valid("reshape_and_cache").items()} | {"k_scale": both[:, 0], "v_scale": both[:, 1]}
    arguments["value"].requires_grad_()
    for _ in range(2):
        pagedkv.reshape_and_cache(**arguments)
    with pytest.raises(NotImplementedError, match=r"^pagedkv.reshape_and_cache has no gradient"):
        (both.sum() + arguments["value"].sum()).backward()


@pytest.mark.parametrize("op", OPS)
def test_a_forward_mode_gradient_raises(plain_pytorch, op):
    with forward_ad.dual_level():
        getattr(pagedkv, op)(**valid(op))
        name, value = next((k, v) for k, v in valid(op).items() if isinstance(v, torch.Tensor) and v.is_floating_point())
        with pytest.raises(NotImplementedError, match=f"^pagedkv.{op} has no gradient"):
            getattr(pagedkv, op)(**valid(op) | {name: forward_ad.make_dual(value, torch.ones_like(value))})


@pytest.mark.parametrize("op", OPS)
def test_what_requires_a_gradient_passes_the_checks_of_torch(plain_pytorch, op):
    torch.library.opcheck(getattr(torch.ops.pagedkv, op).default, (), differentiable(op), test_utils=OPCHECKS[:3])


@pytest.mark.skipif(build.missing_tool("cpu") is not None, reason="inductor needs a C++ compiler")
def test_inductor(device):
    case = decode(device, lengths=(20, 5))
    compiled = torch.compile(lambda *args: pagedkv.quant_paged_attention(*args) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(*case.arguments), case.run() + 1)


# ----------------------------------------------------------------------------------------------------------------- CUDA only


@pytest.fixture
def gpu(device):
    if device.type != "cuda":
        pytest.skip("of CUDA only")
    return device


def in_graph(fn):
    """Capture `fn` after a warm-up on a side stream; returns the graph and its results."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = fn()
    return graph, results


@pytest.mark.parametrize("cache", ["block_head", "token_head", "float16"])
def test_attention_in_a_cuda_graph_with_lengths_and_tables_that_change(gpu, cache):
    """What is captured depends on shapes only: nothing read `seq_lens` on the host."""
    case = decode(gpu, cache=cache, lengths=(300, 17, 0, 64), dtype=torch.float16)
    graph, captured = in_graph(lambda: case.run(return_lse=True, return_block_mass=True))
    for seed, lengths in ((1, (300, 5, 64, 17)), (2, (0, 300, 1, 40)), (3, (256, 16, 300, 0))):
        other = decode(gpu, cache=cache, lengths=lengths, dtype=torch.float16, seed=seed)
        for name in ("q", "k_cache", "k_scale", "v_cache", "v_scale", "block_tables", "seq_lens"):
            into, values = getattr(case, name), getattr(other, name)
            if into is not None:
                into[: len(values)].copy_(values[: len(into)])
        graph.replay()
        assert all(same_bits(a, b) for a, b in zip(captured, case.run(return_lse=True, return_block_mass=True), strict=True))


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_captured_in_a_cuda_graph(gpu, op):
    for args, kwargs in examples(op, gpu):
        expected = getattr(torch.ops.pagedkv, op)(*args, **kwargs)
        graph, results = in_graph(lambda args=args, kwargs=kwargs: getattr(torch.ops.pagedkv, op)(*args, **kwargs))
        graph.replay()
        if expected is not None:
            pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, results)), strict=True)
            assert all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("num_blocks", [1000, 20_000, 300_000])
def test_eviction_in_a_cuda_graph_whose_scores_change(gpu, num_blocks):
    """In each of the selection's sizes; with scores that need its fallbacks, too, though those of the capture did not."""
    scores, k = torch.rand(num_blocks, device=gpu), num_blocks // 7
    mass, valid = torch.rand((num_blocks, 4), device=gpu), torch.ones((num_blocks, 4), dtype=torch.bool, device=gpu)
    graph, (ids, fused, all_scores) = in_graph(
        lambda: (pagedkv.select_eviction_candidates(scores, k), *pagedkv.evict_blocks(scores, scores, mass, valid, k))
    )
    for change in (lambda: scores.uniform_(), lambda: scores.fill_(0.25), lambda: scores.uniform_(0.5, 0.505), lambda: scores.uniform_()):
        change()
        graph.replay()
        assert torch.equal(ids, scores.sort(stable=True).indices[:k])
        assert torch.equal(fused, all_scores.sort(stable=True).indices[:k])


def test_work_goes_to_the_current_stream(gpu):
    """Inputs written late on a side stream are seen by an op queued on it."""
    case = decode(gpu, lengths=(40, 5))
    expected = case.run()
    q = case.q.clone()
    case.q.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case.q.copy_(q)
        out = case.run()
    stream.synchronize()
    assert same_bits(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("op", OPS)
def test_another_device_than_the_current_one(gpu, op):
    torch.cuda.set_device(0)
    for args, kwargs in examples(op, torch.device("cuda:1")):
        results = getattr(torch.ops.pagedkv, op)(*args, **kwargs)
        for result in results if isinstance(results, tuple) else [results] * (results is not None):
            assert result.device == torch.device("cuda:1")
    decode(torch.device("cuda:1")).check()
