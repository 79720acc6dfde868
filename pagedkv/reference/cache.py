"""The quantising cache write in NumPy."""

from __future__ import annotations

import numpy as np

from pagedkv.reference.arrays import exact
from pagedkv.reference.quantization import encode, scale_of
from pagedkv.reference.rotation import rotate


def reshape_and_cache(key, value, k_cache, k_scale, v_cache, v_scale, slot_mapping, *, rotated=False):
    """See `pagedkv.reshape_and_cache`. Leaves its arguments alone and returns `(k_cache, k_scale, v_cache, v_scale)` as they are after."""
    slots = exact(slot_mapping)
    written = []
    for x, cache, scale in ((exact(key), k_cache, k_scale), (exact(value), v_cache, v_scale)):
        x = rotate(x) if rotated else x
        cache, scale = exact(cache).copy(), exact(scale).astype(np.float32)
        if scale.ndim == 3:
            _write_tokens(x, cache, scale, slots)
        else:
            _write_blocks(x, cache, scale, slots)
        written += [cache, scale]
    return tuple(written)


def _write_tokens(x, cache, scale, slots):
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    for token, slot in enumerate(slots):
        if 0 <= slot < num_blocks * block_size:
            b, o = divmod(int(slot), block_size)
            for h in range(num_kv_heads):
                scale[b, o, h] = scale_of(x[token, h]) or 1
                cache[b, o, h] = encode(x[token, h], scale[b, o, h])


def _write_blocks(x, cache, scale, slots):
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    for b in range(num_blocks):
        tokens = [token for token, slot in enumerate(slots) if slot >= 0 and slot // block_size == b]
        if not tokens:
            continue
        starts_afresh = any(slots[token] % block_size == 0 for token in tokens)
        for h in range(num_kv_heads):
            old = scale[b, h]
            holds_zeros = old == 1 and not cache[b, :, h].any()
            held = np.float32(0) if starts_afresh or holds_zeros or old <= 0 else old
            held = held if np.isfinite(held) else np.float32(np.nan)
            needed = scale_of(x[tokens, h])
            new = np.float32(np.nan) if np.isnan(held) or np.isnan(needed) else max(held, needed) or np.float32(1)
            if new != held:
                cache[b, :, h] = encode(np.nan_to_num(cache[b, :, h] * np.float64(held)), new)
            for token in tokens:
                cache[b, slots[token] % block_size, h] = encode(x[token, h], new)
            scale[b, h] = new
