"""The one place that validates arguments.

Whatever the host can see (type, dtype, shape, device, stride, range) raises here, before anything runs:
`TypeError` for a wrong type or dtype, `ValueError` for the rest. A message names the argument, what was
expected and what came. What only the device can see is handled by the kernels, or by `*_values` below
when `PAGEDKV_CHECK=1`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tensors(**arguments: Tensor) -> None:
    """Each argument is a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")


def tensor(name: str, value: Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], shape: tuple, like: Tensor | None = None) -> None:
    """dtype, shape (an int fixes a size, a str only names it), device of `like`, contiguous last dimension."""
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(str(d) for d in dtypes)}, got {value.dtype}")
    if value.dim() != len(shape) or any(not isinstance(want, str) and have != want for have, want in zip(value.shape, shape)):
        raise ValueError(f"{name}: expected shape [{', '.join(str(s) for s in shape)}], got {list(value.shape)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {value.device}")
    if value.dim() > 0 and value.numel() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got stride {value.stride(-1)}")


# ----------------------------------------------------------------------------------------- eviction


def eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency=0.4, w_frequency=0.3, w_attention=0.3) -> None:
    tensor("attention_mass", attention_mass, torch.float32, ("num_blocks", "block_size"))
    num_blocks, block_size = attention_mass.shape
    tensor("recency", recency, torch.float32, (num_blocks,), like=attention_mass)
    tensor("frequency", frequency, torch.float32, (num_blocks,), like=attention_mass)
    tensor("valid_mask", valid_mask, torch.bool, (num_blocks, block_size), like=attention_mass)


def select_eviction_candidates(scores, k) -> None:
    tensor("scores", scores, torch.float32, ("num_blocks",))
    _k(k, scores.shape[0])


def evict_blocks(recency, frequency, attention_mass, valid_mask, k, w_recency=0.4, w_frequency=0.3, w_attention=0.3) -> None:
    eviction_scores(recency, frequency, attention_mass, valid_mask, w_recency, w_frequency, w_attention)
    _k(k, recency.shape[0])


def _k(k, num_blocks) -> None:
    if not 0 <= k <= num_blocks:
        raise ValueError(f"k: expected 0 <= k <= num_blocks ({num_blocks}), got {k}")
