"""One layer's blocks of K and V on the device: written through slots, read through block tables. Who owns a block is kept elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.ops import checks
from pagedkv.ops.attention import paged_attention, quant_paged_attention
from pagedkv.ops.cache import reshape_and_cache
from pagedkv.ops.rotation import hadamard_transform
from pagedkv.quant_spec import KVQuantSpec, kv_spec, logit_shift


class KVPlanes:
    """K and V of one layer and, where the spec quantises, their scales.

    Args:
        num_blocks, block_size, num_kv_heads, head_dim: the pool, `[num_blocks, block_size, num_kv_heads, head_dim]` each for K and V;
            `block_size` 1 to 256, `head_dim` a multiple of 8 up to 256.
        spec: a `KVQuantSpec` or a name in `pagedkv.quant_spec.KV_SPECS`.
        dtype: of an unquantised cache: float16 (the default), bfloat16 or float32. None with a spec that quantises.

    Raises:
        TypeError, ValueError: an argument of another type or value.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        spec: KVQuantSpec | str,
        dtype: torch.dtype | None,
        device: torch.device | str | int,
    ):
        self.spec = kv_spec(spec)
        _positive(num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if self.spec.quantised and dtype is not None:
            raise ValueError(f"dtype: expected None with {self.spec} (the cache is int8), got {dtype}")
        dtype = torch.int8 if self.spec.quantised else dtype or torch.float16
        if not self.spec.quantised and dtype not in checks.FLOATS:
            raise TypeError(f"dtype: expected {' or '.join(map(str, checks.FLOATS))}, got {dtype}")
        if block_size > checks.MAX_BLOCK_SIZE:
            raise ValueError(f"block_size: expected 1 to {checks.MAX_BLOCK_SIZE}, got {block_size}")
        if head_dim % 8 != 0 or head_dim > checks.MAX_HEAD_DIM:
            raise ValueError(f"head_dim: expected a multiple of 8 from 8 to {checks.MAX_HEAD_DIM}, got {head_dim}")

        # Zeros rather than what the memory held: a saved state should not carry somebody's old bytes.
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self._k, self._v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._k_scale = self._v_scale = None
        if self.spec.quantised:
            groups = shape[:3] if self.spec.granularity == "token_head" else (num_blocks, num_kv_heads)
            self._k_scale, self._v_scale = (torch.ones(groups, dtype=torch.float32, device=device) for _ in range(2))
        self.device, self.dtype = self._k.device, dtype

    def tensors(self) -> dict[str, Tensor]:
        """What a block consists of, in the order in which attention takes it."""
        planes = {"k_cache": self._k, "k_scale": self._k_scale, "v_cache": self._v, "v_scale": self._v_scale}
        return {name: plane for name, plane in planes.items() if plane is not None}

    def grow(self, num_blocks: int) -> None:
        """Add empty blocks at the end. The tensors are new; what they held is copied."""
        for name in ("_k", "_k_scale", "_v", "_v_scale"):
            plane = getattr(self, name)
            if plane is not None:
                more = torch.zeros if name in ("_k", "_v") else torch.ones
                setattr(self, name, torch.cat([plane, more((num_blocks, *plane.shape[1:]), dtype=plane.dtype, device=plane.device)]))

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Block `target[i]` becomes `source[i]`, data and scales; both int64 `[n]`."""
        for plane in self.tensors().values():
            plane[target] = plane[source]

    def write(self, key: Tensor, value: Tensor, slots: Tensor, k_means: Tensor | None) -> None:
        """Encode tokens and write them.

        Args:
            key, value: floating `[num_tokens, num_kv_heads, head_dim]`.
            slots: int64 `[num_tokens]`, `block * block_size + offset`.
            k_means: what the spec takes out of K, float32 `[num_tokens, num_kv_heads, head_dim]`; None where it takes out nothing.
        """
        key, value = self.spec.prepare(key, value, k_means)
        if self.spec.quantised:
            # Each block is first written at offset 0, which rids it of its former owner's scale.
            reshape_and_cache(key, value, self._k, self._k_scale, self._v, self._v_scale, slots, rotated=self.spec.rotate)
        else:
            for x, pool in ((key, self._k), (value, self._v)):
                pool.flatten(0, 1)[slots] = (hadamard_transform(x) if self.spec.rotate else x).to(self.dtype)

    def attend(
        self,
        q: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        sm_scale: float,
        k_means: Tensor | None,
        *,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        return_block_mass: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Attention as `pagedkv.quant_paged_attention`, with K, V and q as they were before the spec changed them.

        Args:
            k_means: what was taken out of K, float32 `[num_seqs, num_kv_heads, head_dim]`; None where it was nothing. A soft cap is
                refused where the spec subtracts it.
        """
        shifted = self.spec.subtract_k_mean
        if shifted and logits_soft_cap is not None:
            raise ValueError("logits_soft_cap: expected None with a spec that subtracts the K mean: the cap needs the logits themselves")
        if sinks is not None:
            checks.tensors(sinks=sinks)
            checks.tensor("sinks", sinks, checks.FLOAT32, (q.shape[1],), self.device)
        results = (quant_paged_attention if self.spec.quantised else paged_attention)(
            q,
            *self.tensors().values(),
            block_tables,
            seq_lens,
            sm_scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            # A sink is a logit like the others, so it cannot stand beside shifted ones: it joins afterwards.
            sinks=None if shifted else sinks,
            return_lse=return_lse or (shifted and sinks is not None),
            return_block_mass=return_block_mass,
            rotated=self.spec.rotate,
        )
        out, *more = results if isinstance(results, tuple) else (results,)
        if shifted and len(q) and (return_lse or sinks is not None):
            out, more[0] = _shift_back(out, more[0], logit_shift(q, k_means, sm_scale), sinks)
            more = more if return_lse else more[1:]
        return (out, *more) if more else out


def _shift_back(out: Tensor, lse: Tensor, shift: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(out, lse)` over shifted logits, as they are over the logits themselves, and with the sinks in the denominator."""
    lse = lse + shift
    if sinks is None:
        return out, lse
    empty = torch.isneginf(lse)  # a sequence without tokens: its lse stays -inf, sinks or not
    with_sink = torch.logaddexp(lse, sinks)
    share = torch.where(empty, 0.0, torch.exp(lse - with_sink))
    return (out.float() * share[..., None]).to(out.dtype), torch.where(empty, lse, with_sink)


def _positive(**arguments: int) -> None:
    for name, value in arguments.items():
        if checks.integer(name, value) < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
