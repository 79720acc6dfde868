"""How a KV cache is encoded, as one value: what is done to K, V and q before the kernels, and undone after them.

Two exact identities carry it. `H` orthonormal: `(H q) . (H k) = q . k`, and `sum_t p_t (H v_t) = H sum_t p_t v_t`. `m` one vector
per (sequence, KV head): `q . (k - m) = q . k - q . m`, the same for all tokens, which a softmax does not see. A rotation
spreads one outlier channel over the whole head (QuaRot, Ashkboos et al., 2024; SpinQuant, Liu et al., 2024); a mean taken out of
K leaves its step to what differs between tokens (SageAttention, Zhang et al., 2024).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pagedkv.ops import checks

_SCALE_BYTES = 4  # float32


@dataclasses.dataclass(frozen=True)
class KVQuantSpec:
    """How a cache is encoded.

    Args:
        granularity: what shares a scale, `"block_head"` or `"token_head"` (see `pagedkv.quantize_kv`). None: nothing is
            quantised, the cache is of a floating dtype.
        rotate: K, V and q are multiplied by `hadamard_transform` over head_dim, the output by its inverse.
        subtract_k_mean: a constant per (sequence, KV head), which the caller supplies when it allocates the sequence, is taken
            out of K. Logits shift by `logit_shift`; so the output is the same, and what depends on the logits
            themselves (lse, sinks) has to be shifted back. A soft cap is not compatible: it does not commute with a shift.

    Raises:
        TypeError, ValueError: a field of another type or value.
    """

    granularity: str | None = "block_head"
    rotate: bool = False
    subtract_k_mean: bool = False

    def __post_init__(self) -> None:
        if self.granularity is not None and not isinstance(self.granularity, str):
            raise TypeError(f"granularity: expected a str or None, got {type(self.granularity).__name__}")
        if self.granularity not in (*checks.GRANULARITIES, None):
            raise ValueError(f"granularity: expected {', '.join(map(repr, checks.GRANULARITIES))} or None, got {self.granularity!r}")
        checks.booleans(rotate=self.rotate, subtract_k_mean=self.subtract_k_mean)

    @property
    def quantised(self) -> bool:
        return self.granularity is not None

    def encode_key(self, key: Tensor, k_mean: Tensor | None = None) -> Tensor:
        """What is to be written for `key`.

        Args:
            key: floating `[..., num_kv_heads, head_dim]`.
            k_mean: broadcasts against `key`; given exactly where the spec subtracts it.

        Returns:
            Like `key`; float32 where the spec changes a value, so that the encoding's rounding is the only one.
        """
        if (k_mean is not None) != self.subtract_k_mean:
            raise ValueError(f"k_mean: expected {'a tensor' if self.subtract_k_mean else 'None'} with {self}, got {_kind(k_mean)}")
        if k_mean is not None:
            key = key.float() - k_mean
        return hadamard_transform(key) if self.rotate else key

    def encode_value(self, value: Tensor) -> Tensor:
        """What is to be written for `value`, floating `[..., num_kv_heads, head_dim]`; float32 if rotated."""
        return hadamard_transform(value) if self.rotate else value

    def transform_query(self, q: Tensor) -> Tensor:
        """The query that the encoded K expects, like `q` `[..., num_heads, head_dim]`.

        Rotated in float32 and rounded to q's dtype once. An element grows to at most sqrt(head_dim) times the largest: a float16
        query near that dtype's limit overflows.
        """
        return hadamard_transform(q).to(q.dtype) if self.rotate else q

    def restore_output(self, out: Tensor) -> Tensor:
        """Attention's output over the encoded V, as it is over V itself; like `out` `[..., num_heads, head_dim]`."""
        return hadamard_transform(out).to(out.dtype) if self.rotate else out

    def bytes_per_block(self, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float16) -> int:
        """Bytes of one block of K and of V, scales included. `dtype` is that of an unquantised cache."""
        if not self.quantised:
            return 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
        scales = num_kv_heads * (block_size if self.granularity == "token_head" else 1)
        return 2 * (block_size * num_kv_heads * head_dim + scales * _SCALE_BYTES)

    def bytes_per_token(self, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float16) -> float:
        """`bytes_per_block`, shared among the tokens of a full block."""
        return self.bytes_per_block(block_size, num_kv_heads, head_dim, dtype) / block_size


# Every named scheme; tests and notebooks take them from here. To add one: an entry.
KV_SPECS: dict[str, KVQuantSpec] = {
    "unquantised": KVQuantSpec(None),
    "rotated_unquantised": KVQuantSpec(None, rotate=True),
    "block_head": KVQuantSpec("block_head"),
    "token_head": KVQuantSpec("token_head"),
    "rotated_block_head": KVQuantSpec("block_head", rotate=True),
    "rotated_token_head": KVQuantSpec("token_head", rotate=True),
    "k_mean_block_head": KVQuantSpec("block_head", subtract_k_mean=True),
    "k_mean_rotated_block_head": KVQuantSpec("block_head", rotate=True, subtract_k_mean=True),
    "k_mean_rotated_token_head": KVQuantSpec("token_head", rotate=True, subtract_k_mean=True),
}


def kv_spec(spec: str | KVQuantSpec) -> KVQuantSpec:
    """A spec, or the one of that name in `KV_SPECS`."""
    if isinstance(spec, KVQuantSpec):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"spec: expected a KVQuantSpec or a name, got {type(spec).__name__}")
    if spec not in KV_SPECS:
        raise ValueError(f"spec: expected one of {', '.join(KV_SPECS)}, got {spec!r}")
    return KV_SPECS[spec]


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
    while half < size:
        pairs = y.view(-1, 2, half) if y.numel() else y.view(0, 2, half)
        y = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        half *= 2
    return y.view(x.shape)


def logit_shift(q: Tensor, k_mean: Tensor, sm_scale: float) -> Tensor:
    """What a subtracted K mean took from every logit: `sm_scale * q . k_mean`, float32 `[num_seqs, num_heads]`.

    Args:
        q: `[num_seqs, num_heads, head_dim]`, not transformed.
        k_mean: float32 `[num_seqs, num_kv_heads, head_dim]`.
    """
    num_seqs, num_heads, head_dim = q.shape
    grouped = q.float().reshape(num_seqs, k_mean.shape[1], num_heads // k_mean.shape[1], head_dim)
    return sm_scale * (grouped * k_mean[:, :, None]).sum(-1).view(num_seqs, num_heads)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
