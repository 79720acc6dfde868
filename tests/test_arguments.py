"""Every bad argument raises its kind of error and is named, through the faces and through torch.ops alike."""

import inspect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import decode
from test_eviction import statistics

import pagedkv
from pagedkv.evidence import hardware
from pagedkv.ops import checks

pytestmark = pytest.mark.usefixtures("plain_pytorch")


def valid(op: str) -> dict:
    """Arguments that the op accepts, by name."""
    if op in ("quant_paged_attention", "paged_attention"):
        case = decode("cpu", cache="block_head" if op == "quant_paged_attention" else "float16", lengths=(20, 5))
        names = ("q", "k_cache", "k_scale", "v_cache", "v_scale", "block_tables", "seq_lens", "sm_scale")
        return {name: getattr(case, name) for name in names if getattr(case, name) is not None}
    if op == "merge_attention_states":
        return {"out_a": torch.zeros(3, 2, 8), "lse_a": torch.zeros(3, 2), "out_b": torch.zeros(3, 2, 8), "lse_b": torch.zeros(3, 2)}
    if op == "quantize_kv":
        return {"kv": torch.zeros(3, 16, 2, 8), "granularity": "block_head"}
    if op == "dequantize_kv":
        return {"q": torch.zeros(3, 16, 2, 8, dtype=torch.int8), "scale": torch.ones(3, 2)}
    if op == "reshape_and_cache":
        cache, scale = torch.zeros(3, 16, 2, 8, dtype=torch.int8), torch.ones(3, 2)
        new = {"key": torch.zeros(4, 2, 8), "value": torch.zeros(4, 2, 8), "slot_mapping": torch.arange(4)}
        return {**new, "k_cache": cache, "k_scale": scale, "v_cache": cache.clone(), "v_scale": scale.clone()}
    if op == "select_eviction_candidates":
        return {"scores": torch.zeros(8), "k": 3}
    if op == "accumulate_block_mass":
        return {
            "block_mass": torch.rand(3, 4),
            "block_tables": torch.arange(12, dtype=torch.int32).view(3, 4),
            "total": torch.zeros(12, dtype=torch.int64),
        }
    if op == "select_per_sequence":
        tables, lens = torch.arange(12, dtype=torch.int32).view(3, 4), torch.tensor([64, 33, 5], dtype=torch.int32)
        more = {"budget": 2, "block_size": 16, "references": torch.ones(12, dtype=torch.int32)}
        return {"scores": torch.rand(12), "block_tables": tables, "seq_lens": lens, **more}
    if op in ("token_moments", "channel_statistics"):
        tables, lens = torch.tensor([[1, 0], [2, -1]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
        cache = {"cache": torch.ones(3, 16, 2, 8, dtype=torch.int8), "scale": torch.ones(3, 2)}
        more = {"shift": torch.zeros(2, 1, 2, 8), "gain": torch.ones(2, 1, 2, 8)} if op == "token_moments" else {}
        return {**cache, "block_tables": tables, "seq_lens": lens, "blocks_per_group": 2, **more}
    names = ("recency", "frequency", "attention_mass", "valid_mask")
    return {**dict(zip(names, statistics("cpu", 8, 16), strict=True)), **({"k": 3} if op == "evict_blocks" else {})}


OPS = (
    "quant_paged_attention",
    "paged_attention",
    "merge_attention_states",
    "quantize_kv",
    "dequantize_kv",
    "reshape_and_cache",
    "eviction_scores",
    "select_eviction_candidates",
    "evict_blocks",
    "accumulate_block_mass",
    "select_per_sequence",
    "token_moments",
    "channel_statistics",
)
TENSORS = [(op, name) for op in OPS for name, value in valid(op).items() if isinstance(value, torch.Tensor)]


@pytest.fixture(params=["face", "torch.ops"])
def call(request):
    """The op by its public function, and by the name that torch knows."""
    return lambda op, arguments: getattr(pagedkv if request.param == "face" else torch.ops.pagedkv, op)(**arguments)


def refused(call, op, name, value, error, message=""):
    with pytest.raises(error, match=f"^{name}: expected .*{message}"):
        call(op, {**valid(op), name: value})


def test_every_op_is_covered():
    assert set(OPS) == set(pagedkv.ops.registry.NAMES)


@pytest.mark.parametrize("op", OPS)
def test_the_valid_arguments_are_accepted(call, op):
    call(op, valid(op))


@pytest.mark.parametrize("op, name", TENSORS)
@pytest.mark.parametrize("not_a_tensor", [[1.0], 3, "x", np.ones(3)])
def test_not_a_tensor(op, name, not_a_tensor):
    with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got {type(not_a_tensor).__name__}"):
        getattr(pagedkv, op)(**{**valid(op), name: not_a_tensor})


def not_dense(value: torch.Tensor):
    yield value.to_sparse()
    yield torch.nested.nested_tensor(list(value)) if value.dim() > 1 else torch.nested.nested_tensor([value, value])
    yield torch.nested.nested_tensor([value, value], layout=torch.jagged)
    if value.is_floating_point():
        yield torch.quantize_per_tensor(value.float(), 1.0, 0, torch.qint8)


@pytest.mark.parametrize("op, name", TENSORS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
def test_not_a_dense_tensor(op, name, mode):
    with mode():
        for value in not_dense(valid(op)[name]):
            with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor, got a (sparse_coo|nested|quantised|jagged) one"):
                getattr(pagedkv, op)(**{**valid(op), name: value})


@pytest.mark.parametrize("op", OPS)
def test_a_subclass_and_a_parameter_are_tensors(op):
    class Named(torch.Tensor):
        pass

    for cls in (lambda x: torch.nn.Parameter(x, requires_grad=False), lambda x: x.as_subclass(Named)):
        getattr(pagedkv, op)(**{k: cls(v) if isinstance(v, torch.Tensor) else v for k, v in valid(op).items()})


PARAMETERS = [(op, name, str(p.annotation)) for op in OPS for name, p in inspect.signature(getattr(pagedkv, op)).parameters.items()]
INTS = [(op, name) for op, name, annotation in PARAMETERS if annotation.startswith("int")]
NUMBERS = [(op, name) for op, name, annotation in PARAMETERS if annotation.startswith("float")]


@pytest.mark.parametrize("op, name", INTS)
@pytest.mark.parametrize("cast", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy(op, name, cast):
    def results_with(number):
        torch.manual_seed(0)
        return getattr(pagedkv, op)(**valid(op) | {name: number})

    expected, results = results_with(3), results_with(cast(3))
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (expected, results)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op, name", INTS)
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**5000], ids=["high", "low", "too long to print"])
def test_integers_of_more_than_64_bits(op, name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected an int of 64 bits, got one of [0-9]+"):
        getattr(pagedkv, op)(**valid(op) | {name: value})


@pytest.mark.parametrize("op, name", INTS)
@pytest.mark.parametrize("value", [np.bool_(True), np.float16(1), np.array(1), torch.tensor(1), Fraction(1)])
def test_what_is_no_integer(op, name, value):
    with pytest.raises(TypeError, match=f"^{name}: expected "):
        getattr(pagedkv, op)(**valid(op) | {name: value})


@pytest.mark.parametrize("op, name", NUMBERS)
def test_numbers(op, name):
    for value in (np.float16(0.5), np.float32(0.5), np.float64(0.5), np.int64(1), Fraction(1, 2), 1):
        getattr(pagedkv, op)(**valid(op) | {name: value})
    for value, error in (
        *((x, ValueError) for x in (math.nan, math.inf, -math.inf, 1e39, 10**400)),
        *((x, TypeError) for x in ("1", 1j, True, np.bool_(True), torch.tensor(0.5), np.array(0.5))),
    ):
        with pytest.raises(error, match=f"^{name}: expected "):
            getattr(pagedkv, op)(**valid(op) | {name: value})


@pytest.mark.parametrize("op, name", TENSORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.complex64])
def test_wrong_dtype(call, op, name, dtype):
    refused(call, op, name, valid(op)[name].to(dtype), TypeError, str(dtype))


@pytest.mark.parametrize("op, name", TENSORS)
def test_wrong_rank(call, op, name):
    value = valid(op)[name]
    refused(call, op, name, value[..., None, None].expand(*value.shape, 8, 8), ValueError)
    refused(call, op, name, value.flatten()[0], ValueError)


@pytest.mark.parametrize("op, name", TENSORS)
def test_wrong_size(call, op, name):
    """A row more than the other tensors have; those that set the sizes pass the blame on."""
    value = valid(op)[name]
    longer = torch.cat([value, value[:1]])
    alone = {"kv", "scores", "total"}
    if name not in alone:
        with pytest.raises(ValueError, match=r"^\w+: expected shape "):
            call(op, {**valid(op), name: longer})


@pytest.mark.parametrize("op, name", TENSORS)
def test_last_dimension_not_contiguous(call, op, name):
    value = valid(op)[name]
    spread = torch.stack([value, value], dim=-1)[..., 0]
    assert spread.shape == value.shape and spread.stride(-1) == 2
    refused(call, op, name, spread, ValueError, "contiguous last dimension")


@pytest.mark.parametrize("op, name", [(op, name) for op, name in TENSORS if name not in ("kv", "scores")])
def test_another_device(call, op, name):
    with pytest.raises(ValueError, match=r"^\w+: expected device (cpu|meta), got (cpu|meta)"):
        call(op, {**valid(op), name: valid(op)[name].to("meta")})


KV_OPS = [
    ("quant_paged_attention", "k_cache"),
    ("paged_attention", "k_cache"),
    ("reshape_and_cache", "k_cache"),
    ("quantize_kv", "kv"),
    ("dequantize_kv", "q"),
    ("token_moments", "cache"),
    ("channel_statistics", "cache"),
]


@pytest.mark.parametrize("op, name", KV_OPS)
@pytest.mark.parametrize("block_size", [0, 257])
def test_block_size_out_of_range(call, op, name, block_size):
    old = valid(op)[name]
    refused(call, op, name, old.new_zeros((old.shape[0], block_size, *old.shape[2:])), ValueError, f"block_size.* got {block_size}")


@pytest.mark.parametrize("op, name", KV_OPS)
@pytest.mark.parametrize("head_dim", [0, 4, 63, 257, 264])
def test_head_dim_out_of_range(call, op, name, head_dim):
    old = valid(op)[name]
    refused(call, op, name, old.new_zeros((*old.shape[:3], head_dim)), ValueError, f"head_dim.* got {head_dim}")


@pytest.mark.parametrize("op, name", KV_OPS)
def test_no_kv_heads(call, op, name):
    old = valid(op)[name]
    refused(call, op, name, old.new_zeros((*old.shape[:2], 0, old.shape[3])), ValueError, "KV head")


ATTENTION = ("quant_paged_attention", "paged_attention")


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("heads", [0, 1, 3, 5])
def test_head_ratio_that_is_no_integer(call, op, heads):
    refused(call, op, "q", torch.zeros(2, heads, 64), ValueError, f"multiple of num_kv_heads \\(2\\), got {heads}")


@pytest.mark.parametrize("op", ATTENTION)
def test_head_dim_of_q_and_of_the_cache_differ(call, op):
    refused(call, op, "q", torch.zeros(2, 4, 72), ValueError, "head_dim 64 like k_cache, got 72")


@pytest.mark.parametrize("op", ATTENTION)
def test_k_and_v_differ(call, op):
    v = valid(op)["v_cache"]
    refused(call, op, "v_cache", v[:, :8], ValueError, "shape")
    refused(call, op, "v_cache", v.float(), TypeError, "torch.float32")


@pytest.mark.parametrize("op, name, cache", [("quant_paged_attention", "v_scale", "k_cache"), ("reshape_and_cache", "v_scale", "k_cache")])
def test_scales_of_unlike_granularity(call, op, name, cache):
    refused(call, op, name, torch.ones(valid(op)[cache].shape[:3]), ValueError, "rank 2 like k_scale, got 3")


@pytest.mark.parametrize("op", ["quant_paged_attention", "dequantize_kv"])
def test_scale_of_another_shape(call, op):
    name = "scale" if op == "dequantize_kv" else "k_scale"
    refused(call, op, name, torch.ones(valid(op)[name].shape[0], 3), ValueError, "shape")


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize(
    "name, value, error",
    [
        ("sliding_window", 0, ValueError),
        ("sliding_window", -5, ValueError),
        ("logits_soft_cap", 0.0, ValueError),
        ("logits_soft_cap", -1.0, ValueError),
        ("logits_soft_cap", math.inf, ValueError),
        ("logits_soft_cap", math.nan, ValueError),
        ("sm_scale", math.nan, ValueError),
        ("sm_scale", math.inf, ValueError),
        ("sinks", torch.zeros(3), ValueError),
        ("sinks", torch.zeros(4, 1), ValueError),
        ("sinks", torch.zeros(4, dtype=torch.float16), TypeError),
        ("sinks", torch.zeros(8)[::2], ValueError),
        ("sinks", torch.zeros(4, device="meta"), ValueError),
    ],
)
def test_attention_options_out_of_range(call, op, name, value, error):
    refused(call, op, name, value, error)


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize(
    "name, value",
    [
        ("sliding_window", 1.5),
        ("sliding_window", True),
        ("logits_soft_cap", "30"),
        ("sm_scale", "x"),
        ("sm_scale", None),
        ("sinks", [0.0]),
        ("return_lse", 1),
        ("return_block_mass", None),
        ("rotated", 1),
    ],
)
def test_attention_options_of_another_type(op, name, value):
    with pytest.raises(TypeError, match=f"^{name}: expected "):
        getattr(pagedkv, op)(**{**valid(op), name: value})


@pytest.mark.parametrize("op", ["quantize_kv", "reshape_and_cache"])
def test_rotated(op):
    with pytest.raises(TypeError, match=r"^rotated: expected a bool, got str"):
        getattr(pagedkv, op)(**valid(op), rotated="yes")


@pytest.mark.parametrize("op", ["select_eviction_candidates", "evict_blocks"])
def test_k(call, op):
    for k in (-1, 9):
        refused(call, op, "k", k, ValueError, f"got {k}")
    for k in (1.0, None, "3", True):
        with pytest.raises(TypeError, match=r"^k: expected an int"):
            getattr(pagedkv, op)(**{**valid(op), "k": k})


@pytest.mark.parametrize("op", ["eviction_scores", "evict_blocks"])
def test_weights(op):
    with pytest.raises(TypeError, match=r"^w_recency: expected a float, got str"):
        getattr(pagedkv, op)(**valid(op), w_recency="0.4")


@pytest.mark.parametrize(
    "name, value", [("budget", -1), ("protect_first", -1), ("protect_last", -2), ("block_size", 0), ("block_size", 257)]
)
def test_numbers_of_a_selection(call, name, value):
    refused(call, "select_per_sequence", name, value, ValueError, f"got {value}")
    with pytest.raises(TypeError, match=f"^{name}: expected an int"):
        pagedkv.select_per_sequence(**{**valid("select_per_sequence"), name: 1.5})


def test_budgets_of_a_selection():
    for budget, error in ((torch.ones(2, dtype=torch.int32), ValueError), (torch.ones(3), TypeError)):
        with pytest.raises(error, match=r"^budget: expected "):
            pagedkv.select_per_sequence(**{**valid("select_per_sequence"), "budget": budget})


def test_scores_by_place(call):
    refused(call, "select_per_sequence", "scores", torch.zeros(3, 5), ValueError, "shape \\[3, 4\\]")


def test_decay(call):
    for decay in (-0.1, 1.5, math.nan):
        refused(call, "accumulate_block_mass", "decay", decay, ValueError, f"got {decay}")


def test_groups(call):
    for op in ("token_moments", "channel_statistics"):
        refused(call, op, "blocks_per_group", 0, ValueError, "got 0")
    refused(call, "token_moments", "gain", None, ValueError, "as shift is, got None")
    refused(call, "token_moments", "gain", torch.ones(2, 2, 2, 8), ValueError, "shape")
    refused(call, "token_moments", "cache", torch.zeros(3, 16, 2, 8), TypeError, "torch.int8")


def test_granularity(call):
    refused(call, "quantize_kv", "granularity", "channel", ValueError, "'block_head' or 'token_head', got 'channel'")
    with pytest.raises(TypeError, match=r"^granularity: expected a str, got int"):
        pagedkv.quantize_kv(valid("quantize_kv")["kv"], 3)


@pytest.mark.parametrize("name", ["k_cache", "k_scale", "v_cache", "v_scale"])
def test_a_cache_that_shares_memory_between_its_elements(call, name):
    expanded = valid("reshape_and_cache")[name][:1].expand(valid("reshape_and_cache")[name].shape)
    refused(call, "reshape_and_cache", name, expanded, ValueError, "memory of its own")


@pytest.mark.parametrize("device, error", [("meta", ValueError), ("mps", ValueError)])
def test_backend_names_only_what_it_knows(device, error):
    with pytest.raises(error, match=r"^device: expected cpu or cuda"):
        pagedkv.backend(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_backend_of_a_device_that_is_not_there():
    with pytest.raises(RuntimeError, match=r"^device: cuda was asked for"):
        pagedkv.backend("cuda")


@pytest.mark.parametrize("present, said", [(1, "cuda:0 only"), (4, "cuda:0 to cuda:3")])
@pytest.mark.parametrize("ask", [pagedkv.backend, hardware.resolve], ids=["backend", "resolve"])
def test_a_device_index_past_the_last(monkeypatch, present, said, ask):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    with pytest.raises(RuntimeError, match=f"^device: cuda:9 was asked for, but this machine has {said}$"):
        ask("cuda:9")


@pytest.mark.parametrize("k, v", [("k_cache", "v_cache"), ("k_scale", "v_scale")])
def test_a_cache_that_shares_memory_with_the_other(call, k, v):
    shared = valid("reshape_and_cache")[k]
    grown = torch.cat([shared, shared])
    call("reshape_and_cache", {**valid("reshape_and_cache"), k: grown[: len(shared)], v: grown[len(shared) :]})
    for first in (0, 1, len(shared) - 1):
        arguments = {**valid("reshape_and_cache"), k: grown[: len(shared)], v: grown[first : first + len(shared)]}
        with pytest.raises(ValueError, match=f"^{v}: expected memory of its own, got elements that belong to {k}"):
            call("reshape_and_cache", arguments)


@pytest.mark.parametrize("dim", range(5))
def test_k_and_v_as_slices_of_one_tensor_do_not_overlap(dim):
    shape = [4, 3, 2, 8]
    shape.insert(dim, 3)
    kv = torch.zeros(shape, dtype=torch.int8)
    if dim < 4:  # else the last dimension would not be contiguous
        assert not checks._views_overlap(kv.select(dim, 0), kv.select(dim, 1))
        assert not checks._views_overlap(kv.select(dim, 2), kv.select(dim, 0))
    assert checks._views_overlap(kv, kv)
    if shape[dim] > 2:
        assert checks._views_overlap(kv.narrow(dim, 0, 2), kv.narrow(dim, 1, 2))
        assert not checks._views_overlap(kv.narrow(dim, 0, 1), kv.narrow(dim, 1, 1))
