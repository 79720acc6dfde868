"""The one place that validates arguments.

Whatever the host can see (type, dtype, shape, device, stride, range) raises here, before anything runs:
`TypeError` for a wrong type or dtype, `ValueError` for the rest. A message names the argument, what was
expected and what came. What only the device can see is handled by the kernels, or by the `*_values`
functions below when `PAGEDKV_CHECK=1`.

A decode step calls an op once a layer, so the good path is kept short: comparisons first, words only on failure.
"""

from __future__ import annotations

import functools
import numbers

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT32, INT8, INT32, INT64, BOOL = (torch.float32,), (torch.int8,), (torch.int32,), (torch.int64,), (torch.bool,)
GRANULARITIES = ("block_head", "token_head")
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).tiny
INT64_MAX = torch.iinfo(torch.int64).max
MAX_BLOCK_SIZE = 256
MAX_HEAD_DIM = 256

# ------------------------------------------------------------------------- types, which only a Python caller can get wrong


def tensors(**arguments: Tensor) -> None:
    """Each argument is a tensor, and of a subclass only a dense one."""
    for name, value in arguments.items():
        if type(value) is not Tensor:
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
            dense(name, value)


def dense(name: str, value: Tensor) -> None:
    kind = "nested" if value.is_nested else "quantised" if value.is_quantized else value.layout
    if kind is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got a {str(kind).removeprefix('torch.')} one")


def integer(name: str, value: int) -> int:
    """The value as an int of 64 bits, if it is one, one of NumPy's, or one that `torch.compile` knows by a symbol."""
    if type(value) is not int:
        if isinstance(value, torch.SymInt):
            return value
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        value = int(value)
    if _outside(value, -INT64_MAX - 1, INT64_MAX):
        raise ValueError(f"{name}: expected an int of 64 bits, got one of {value.bit_length() + 1}")
    return value


def number(name: str, value: float) -> float:
    """The same for a float; an int passes for one."""
    if type(value) is float or isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number that a float can hold, got {type(value).__name__} past its range") from None


def _outside(value: float, low: float, high: float) -> bool:
    """Whether a number is outside `low..high`, as NaN is. What is not known before a compiled graph runs is judged there."""
    if not torch.compiler.is_compiling() and isinstance(value, (int, float)) and isinstance(high, (int, float)):
        return not low <= value <= high
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return not (guard_or_true(low <= value) and guard_or_true(value <= high))


def booleans(**arguments: bool) -> None:
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def present(device: torch.device) -> None:
    """Raises `RuntimeError` where `device` is a CUDA device that this machine lacks."""
    if device.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        why = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        raise RuntimeError(f"device: {device} was asked for, but {why}")
    if device.index is not None and device.index >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0 only"
        raise RuntimeError(f"device: {device} was asked for, but this machine has {there}")


# ---------------------------------------------------------------------------------------------------- one tensor, one number


def tensor(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple, device: torch.device | None = None) -> None:
    """dtype, shape (an int fixes a size, a str only names it), device, contiguous last dimension."""
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(str(d) for d in dtypes)}, got {value.dtype}")
    have = value.shape
    if have != shape and not _fits(have, shape):
        raise ValueError(f"{name}: expected shape [{', '.join(str(s) for s in shape)}], got {list(have)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}")
    if not value.is_contiguous() and value.stride(-1) != 1 and have[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got stride {value.stride(-1)}")


def _fits(have: torch.Size, shape: tuple) -> bool:
    if len(have) != len(shape):
        return False
    for got, want in zip(have, shape, strict=True):  # noqa: SIM110  (a generator costs more than the rest of the check)
        if want.__class__ is not str and got != want:
            return False
    return True


def _cache(name: str, value: Tensor, dtypes, device: torch.device | None = None) -> None:
    """A pool of blocks `[num_blocks, block_size, num_kv_heads, head_dim]` with sizes within the contract."""
    tensor(name, value, dtypes, ("num_blocks", "block_size", "num_kv_heads", "head_dim"), device)
    _, block_size, num_kv_heads, head_dim = value.shape
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"{name}: expected a block_size (dimension 1) of 1 to {MAX_BLOCK_SIZE}, got {block_size}")
    if num_kv_heads < 1:
        raise ValueError(f"{name}: expected at least one KV head (dimension 2), got {num_kv_heads}")
    _head_dim(name, head_dim)


def _head_dim(name: str, head_dim: int) -> None:
    if head_dim % 8 != 0 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected a head_dim (last dimension) that is a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {head_dim}")


def _scale(name: str, value: Tensor, cache: torch.Size, device: torch.device) -> None:
    """One scale per (block, head), or per (block, token, head), of a cache of the given shape."""
    num_blocks, block_size, num_kv_heads, _ = cache
    rank = value.dim()
    if rank == 2:
        tensor(name, value, FLOAT32, (num_blocks, num_kv_heads), device)
    elif rank == 3 or value.dtype != torch.float32:
        tensor(name, value, FLOAT32, (num_blocks, block_size, num_kv_heads), device)
    else:
        raise ValueError(
            f"{name}: expected shape [{num_blocks}, {num_kv_heads}] (block-head) or"
            f" [{num_blocks}, {block_size}, {num_kv_heads}] (token-head), got {list(value.shape)}"
        )


def _quantised_pair(k_cache: Tensor, k_scale: Tensor, v_cache: Tensor, v_scale: Tensor, device: torch.device) -> None:
    _cache("k_cache", k_cache, INT8, device)
    shape = k_cache.shape
    tensor("v_cache", v_cache, INT8, shape, device)
    _scale("k_scale", k_scale, shape, device)
    _scale("v_scale", v_scale, shape, device)
    if k_scale.dim() != v_scale.dim():
        raise ValueError(f"v_scale: expected rank {k_scale.dim()} like k_scale, got {v_scale.dim()}")


# ------------------------------------------------------------------------------------------------------------------ attention


def quant_paged_attention(
    q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap, sinks, *_
) -> None:
    device = q.device
    tensor("q", q, FLOATS, ("num_seqs", "num_heads", "head_dim"))
    _quantised_pair(k_cache, k_scale, v_cache, v_scale, device)
    _decode(q.shape, k_cache.shape, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap, sinks, device)


def paged_attention(q, k_cache, v_cache, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap, sinks, *_) -> None:
    device = q.device
    tensor("q", q, FLOATS, ("num_seqs", "num_heads", "head_dim"))
    _cache("k_cache", k_cache, FLOATS, device)
    tensor("v_cache", v_cache, (k_cache.dtype,), k_cache.shape, device)
    _decode(q.shape, k_cache.shape, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap, sinks, device)


def _decode(q_shape, cache_shape, block_tables, seq_lens, sm_scale, sliding_window, logits_soft_cap, sinks, device) -> None:
    num_seqs, num_heads, head_dim = q_shape
    _, _, num_kv_heads, cache_head_dim = cache_shape
    if head_dim != cache_head_dim:
        raise ValueError(f"q: expected head_dim {cache_head_dim} like k_cache, got {head_dim}")
    if num_heads < 1 or num_heads % num_kv_heads != 0:
        raise ValueError(f"q: expected num_heads to be a multiple of num_kv_heads ({num_kv_heads}), got {num_heads}")
    tensor("block_tables", block_tables, INT32, (num_seqs, "max_blocks"), device)
    tensor("seq_lens", seq_lens, INT32, (num_seqs,), device)
    if sinks is not None:
        tensor("sinks", sinks, FLOAT32, (num_heads,), device)
    if _outside(sm_scale, -FLOAT32_MAX, FLOAT32_MAX):
        raise ValueError(f"sm_scale: expected a number that is finite in float32, got {sm_scale}")
    if sliding_window is not None and _outside(sliding_window, 1, INT64_MAX):
        raise ValueError(f"sliding_window: expected at least 1, or None for no window, got {sliding_window}")
    if logits_soft_cap is not None and _outside(logits_soft_cap, FLOAT32_TINY, FLOAT32_MAX):
        raise ValueError(f"logits_soft_cap: expected a number above 0 and finite in float32, or None for no cap, got {logits_soft_cap}")


def merge_attention_states(out_a, lse_a, out_b, lse_b) -> None:
    device = out_a.device
    tensor("out_a", out_a, FLOATS, ("num_seqs", "num_heads", "head_dim"))
    num_seqs, num_heads, head_dim = out_a.shape
    _head_dim("out_a", head_dim)
    tensor("lse_a", lse_a, FLOAT32, (num_seqs, num_heads), device)
    tensor("out_b", out_b, (out_a.dtype,), out_a.shape, device)
    tensor("lse_b", lse_b, FLOAT32, (num_seqs, num_heads), device)


def quant_paged_attention_values(q, k_cache, k_scale, v_cache, v_scale, block_tables, seq_lens, sm_scale, sliding_window, *_) -> None:
    _block_values(block_tables, seq_lens, sliding_window, k_cache.shape[0], k_cache.shape[1])


def paged_attention_values(q, k_cache, v_cache, block_tables, seq_lens, sm_scale, sliding_window, *_) -> None:
    _block_values(block_tables, seq_lens, sliding_window, k_cache.shape[0], k_cache.shape[1])


def _block_values(block_tables: Tensor, seq_lens: Tensor, sliding_window: int | None, num_blocks: int, block_size: int) -> None:
    """Sequence lengths fit the table; the blocks that hold attended tokens lie in the pool."""
    tables, lengths = block_tables.cpu(), seq_lens.cpu().long()  # int32 would wrap around under the largest windows
    capacity = tables.shape[1] * block_size
    bad = ((lengths < 0) | (lengths > capacity)).nonzero()
    if len(bad) > 0:
        i = int(bad[0, 0])
        raise ValueError(f"seq_lens[{i}]: expected 0 to {capacity} (max_blocks * block_size), got {int(lengths[i])}")
    first = (lengths - sliding_window).clamp(min=0) // block_size if sliding_window is not None else torch.zeros_like(lengths)
    block = torch.arange(tables.shape[1])
    attended = (block >= first[:, None]) & (block * block_size < lengths[:, None])
    bad = (attended & ((tables < 0) | (tables >= num_blocks))).nonzero()
    if len(bad) > 0:
        i, j = bad[0].tolist()
        raise ValueError(
            f"block_tables[{i}, {j}]: expected a block id from 0 to {num_blocks - 1}"
            f" (the sequence has {int(lengths[i])} tokens), got {int(tables[i, j])}"
        )


# --------------------------------------------------------------------------------------------------------------- quantisation


def quantize_kv(kv, granularity, *_) -> None:
    _cache("kv", kv, FLOATS)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity: expected {' or '.join(map(repr, GRANULARITIES))}, got {granularity!r}")


def dequantize_kv(q, scale) -> None:
    _cache("q", q, INT8)
    _scale("scale", scale, q.shape, q.device)


def reshape_and_cache(key, value, k_cache, k_scale, v_cache, v_scale, slot_mapping, *_) -> None:
    device = key.device
    _quantised_pair(k_cache, k_scale, v_cache, v_scale, device)
    tensor("key", key, FLOATS, ("num_tokens", *k_cache.shape[2:]))
    tensor("value", value, (key.dtype,), key.shape, device)
    tensor("slot_mapping", slot_mapping, INT64, key.shape[:1], device)
    for name, written in (("k_cache", k_cache), ("k_scale", k_scale), ("v_cache", v_cache), ("v_scale", v_scale)):
        if 0 in written.stride() and _overlaps_itself(written):
            raise ValueError(f"{name}: expected memory of its own for each element, got strides {written.stride()} (an expanded tensor)")
    for k_name, k, v_name, v in (("k_cache", k_cache, "v_cache", v_cache), ("k_scale", k_scale, "v_scale", v_scale)):
        if torch._C._is_alias_of(k, v) and _views_overlap(k, v):
            raise ValueError(f"{v_name}: expected memory of its own, got elements that belong to {k_name}")


def reshape_and_cache_values(key, value, k_cache, k_scale, v_cache, v_scale, slot_mapping, *_) -> None:
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    slots = slot_mapping.cpu()
    bad = (slots >= num_slots).nonzero()
    if len(bad) > 0:
        i = int(bad[0, 0])
        raise ValueError(
            f"slot_mapping[{i}]: expected less than {num_slots} (num_blocks * block_size), or negative to skip, got {int(slots[i])}"
        )


def _views_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage, of one shape and dtype, have an element in common.

    Exact for views of equal strides whose dimensions nest (slices of one tensor, such as `kv[:, 0]` and `kv[:, 1]`). Not
    seen: views of different strides, sizes known only symbolically (while compiling), and two storages over one memory.
    """
    strides = a.stride()
    if strides != b.stride():
        return False
    try:
        return _shifted_view_overlaps(a.storage_offset() - b.storage_offset(), tuple(a.shape), strides)
    except TypeError:  # symbolic sizes have no hash
        return False


@functools.lru_cache(maxsize=256)  # a decode step asks the same once a layer
def _shifted_view_overlaps(distance: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    dims = sorted(((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1), reverse=True)
    reach = [sum(stride * (size - 1) for stride, size in dims[i:]) for i in range(len(dims) + 1)]  # of dims[i:], in elements
    if 0 in shape or any(stride <= inner for (stride, _), inner in zip(dims, reach[1:], strict=True)):
        return False

    def meet(distance: int, i: int) -> bool:
        """Whether dims[i:] hold steps, each within +-(size - 1), that add up to the distance."""
        if i == len(dims) or abs(distance) > reach[i]:
            return distance == 0
        stride, size = dims[i]
        steps = distance // stride
        return any(abs(n) < size and meet(distance - n * stride, i + 1) for n in (steps, steps + 1))

    return meet(distance, 0)


def _overlaps_itself(value: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


# ------------------------------------------------------------------------------------------------------------------- eviction


def eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency, w_frequency, w_attention) -> None:
    tensor("attention_mass", attention_mass, FLOAT32, ("num_blocks", "block_size"))
    num_blocks, block_size = attention_mass.shape
    device = attention_mass.device
    tensor("recency", recency, FLOAT32, (num_blocks,), device)
    tensor("frequency", frequency, FLOAT32, (num_blocks,), device)
    tensor("valid_mask", valid_mask, BOOL, (num_blocks, block_size), device)
    for name, weight in (("w_recency", w_recency), ("w_frequency", w_frequency), ("w_attention", w_attention)):
        if _outside(weight, -FLOAT32_MAX, FLOAT32_MAX):
            raise ValueError(f"{name}: expected a number that is finite in float32, got {weight}")


def select_eviction_candidates(scores, k) -> None:
    tensor("scores", scores, FLOAT32, ("num_blocks",))
    _k(k, scores.shape[0])


def evict_blocks(recency, frequency, attention_mass, valid_mask, k, *weights) -> None:
    eviction_scores(recency, frequency, attention_mass, valid_mask, *weights)
    _k(k, recency.shape[0])


def _k(k, num_blocks) -> None:
    if _outside(k, 0, num_blocks):
        raise ValueError(f"k: expected 0 <= k <= num_blocks ({num_blocks}), got {k}")


# ------------------------------------------------------------------------------------------- eviction, sequence by sequence


def accumulate_block_mass(block_mass, block_tables, total, decay) -> None:
    tensor("block_mass", block_mass, FLOAT32, ("num_seqs", "max_blocks"))
    tensor("block_tables", block_tables, INT32, block_mass.shape, block_mass.device)
    tensor("total", total, INT64, ("num_blocks",), block_mass.device)
    if _outside(decay, 0, 1):
        raise ValueError(f"decay: expected 0 to 1, got {decay}")


def accumulate_block_mass_values(block_mass, block_tables, total, decay) -> None:
    bad = ((block_mass > 0) & ((block_tables < 0) | (block_tables >= len(total)))).cpu().nonzero()
    if len(bad) > 0:
        i, j = bad[0].tolist()
        raise ValueError(
            f"block_tables[{i}, {j}]: expected a block id from 0 to {len(total) - 1}"
            f" (its mass is {float(block_mass[i, j])}), got {int(block_tables[i, j])}"
        )


def select_per_sequence(scores, block_tables, seq_lens, budget, protect_first, protect_last, block_size, references, budgets) -> None:
    device = scores.device
    tensor("block_tables", block_tables, INT32, ("num_seqs", "max_blocks"))
    if scores.dim() == 2:
        tensor("scores", scores, FLOAT32, block_tables.shape, block_tables.device)
    else:
        tensor("scores", scores, FLOAT32, ("num_blocks",), block_tables.device)
    tensor("seq_lens", seq_lens, INT32, block_tables.shape[:1], device)
    for name, value in (("budget", budget), ("protect_first", protect_first), ("protect_last", protect_last)):
        if _outside(value, 0, INT64_MAX):
            raise ValueError(f"{name}: expected at least 0, got {value}")
    if _outside(block_size, 1, MAX_BLOCK_SIZE):
        raise ValueError(f"block_size: expected 1 to {MAX_BLOCK_SIZE}, got {block_size}")
    if references is not None:
        tensor("references", references, INT32, scores.shape if scores.dim() == 1 else ("num_blocks",), device)
    if budgets is not None:
        tensor("budget", budgets, INT32, seq_lens.shape, device)


def select_per_sequence_values(scores, block_tables, seq_lens, budget, protect_first, protect_last, block_size, references, *_) -> None:
    pool = scores if scores.dim() == 1 else references
    _block_values(block_tables, seq_lens, None, 2**31 - 1 if pool is None else len(pool), block_size)


# ----------------------------------------------------------------------------------------------------- statistics of K or V


def token_moments(cache, scale, block_tables, seq_lens, blocks_per_group, shift, gain) -> None:
    groups = _paged_tokens(cache, scale, block_tables, seq_lens, blocks_per_group)
    if (shift is None) != (gain is None):
        raise ValueError(
            f"{'shift' if shift is None else 'gain'}: expected a tensor, as {'gain' if shift is None else 'shift'} is, got None"
        )
    if shift is not None:
        sizes = (block_tables.shape[0], groups, *cache.shape[2:])
        tensor("shift", shift, FLOAT32, sizes, cache.device)
        tensor("gain", gain, FLOAT32, sizes, cache.device)


def channel_statistics(cache, scale, block_tables, seq_lens, blocks_per_group) -> None:
    _paged_tokens(cache, scale, block_tables, seq_lens, blocks_per_group)


def paged_tokens_values(cache, scale, block_tables, seq_lens, *_) -> None:
    _block_values(block_tables, seq_lens, None, cache.shape[0], cache.shape[1])


def _paged_tokens(cache, scale, block_tables, seq_lens, blocks_per_group) -> int | str:
    """Returns the number of groups, or its name where a compiled graph does not know it yet."""
    _cache("cache", cache, FLOATS if scale is None else INT8)
    if scale is not None:
        _scale("scale", scale, cache.shape, cache.device)
    tensor("block_tables", block_tables, INT32, ("num_seqs", "max_blocks"), cache.device)
    tensor("seq_lens", seq_lens, INT32, block_tables.shape[:1], cache.device)
    if _outside(blocks_per_group, 1, INT64_MAX):
        raise ValueError(f"blocks_per_group: expected at least 1, got {blocks_per_group}")
    return -(-block_tables.shape[1] // blocks_per_group) if isinstance(blocks_per_group, int) else "num_groups"
