"""Tensors to arrays."""

from __future__ import annotations

import numpy as np
import torch


def exact(x) -> np.ndarray:
    """An array that holds the values of `x`; floating-point ones as float64, which holds every half and float exactly."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        x = (x.double() if x.dtype.is_floating_point else x).numpy()
    x = np.asarray(x)
    return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x
