"""The Hadamard rotation of a cache in plain PyTorch; the kernels do the same in registers."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal block-diagonal Hadamard matrix: its own inverse.

    The blocks have the size of the largest power of two that divides the dimension (128: one block; 80: five of 16; odd: the
    identity), Sylvester's order. Butterflies, `n log n` a row. In float32 (float64 stays); the factor goes first, so that nothing
    overflows that does not in the result. A NaN or inf spreads over its block.

    Args:
        x: floating `[..., n]`.

    Returns:
        float32 (float64 for float64), contiguous, same shape.
    """
    if not x.dtype.is_floating_point:
        raise TypeError(f"x: expected a floating dtype, got {x.dtype}")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: expected a last dimension of at least 1, got shape {list(x.shape)}")
    size = x.shape[-1] & -x.shape[-1]
    y = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous() * size**-0.5
    half = 1
    while half < size:  # in the order of kernels/hadamard.h: float32 sums that differ in it differ in their last bits
        pairs = y.view(-1, 2, half) if y.numel() else y.view(0, 2, half)
        y = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        half *= 2
    return y.view(x.shape)
