"""INT8 encoding of KV blocks in NumPy."""

from __future__ import annotations

import numpy as np

from pagedkv.reference.arrays import exact
from pagedkv.reference.rotation import rotate


def quantize_kv(kv, granularity="block_head", *, rotated=False):
    """See `pagedkv.quantize_kv`. The scale is float32: it is what gets stored."""
    kv = rotate(exact(kv)) if rotated else exact(kv)
    num_blocks, block_size, num_kv_heads, _ = kv.shape
    q = np.zeros(kv.shape, np.int8)
    scale = np.zeros((num_blocks, block_size, num_kv_heads) if granularity == "token_head" else (num_blocks, num_kv_heads), np.float32)
    for b in range(num_blocks):
        for h in range(num_kv_heads):
            if granularity == "token_head":
                for t in range(block_size):
                    scale[b, t, h] = scale_of(kv[b, t, h]) or 1
                    q[b, t, h] = encode(kv[b, t, h], scale[b, t, h])
            else:
                scale[b, h] = scale_of(kv[b, :, h]) or 1
                q[b, :, h] = encode(kv[b, :, h], scale[b, h])
    return q, scale


def dequantize_kv(q, scale):
    """See `pagedkv.dequantize_kv`."""
    q, scale = exact(q), exact(scale)
    kv = np.zeros(q.shape)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                kv[b, t, h] = q[b, t, h] * (scale[b, h] if scale.ndim == 2 else scale[b, t, h])
    return kv


def scale_of(group) -> np.float32:
    """`max|x| / 127` of a group, NaN if a value is not finite, 0 if all are zero; a subnormal scale is rounded up.

    The largest floats are the other end: there the scale is rounded down, so that 127 times it does not overflow float32.
    """
    if not np.all(np.isfinite(group)):
        return np.float32(np.nan)
    exact_scale = np.max(np.abs(group), initial=0.0) / 127
    scale = np.float32(exact_scale)
    if scale < np.finfo(np.float32).tiny and scale < exact_scale:
        scale = np.nextafter(scale, np.float32(np.inf))
    if 127 * np.float64(scale) > np.finfo(np.float32).max:
        scale = np.nextafter(scale, np.float32(0))
    return scale


def encode(group, scale):
    """`round(x / scale)`, half to even, within -127..127; zeros for a NaN scale."""
    if np.isnan(scale):
        return np.zeros(np.shape(group), np.int8)
    return np.clip(np.rint(np.asarray(group) / np.float64(scale)), -127, 127).astype(np.int8)
