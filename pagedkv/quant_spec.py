"""How a KV cache is encoded, as one value. The cache write applies it and attention undoes it; no other code needs to know.

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
        rotate: K and V are stored multiplied by the Hadamard matrix over head_dim (`rotated` of the ops; see `hadamard_transform`).
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

    def prepare(self, key: Tensor, value: Tensor, k_mean: Tensor | None) -> tuple[Tensor, Tensor]:
        """K and V as the cache write takes them: K without its mean, if there is one to take out (it broadcasts against `key`)."""
        if k_mean is None:
            return key, value
        return key.float() - k_mean, value.float()  # float32, so that the encoding's rounding is the only one

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


def logit_shift(q: Tensor, k_mean: Tensor, sm_scale: float) -> Tensor:
    """What a subtracted K mean took from every logit: `sm_scale * q . k_mean`, float32 `[num_seqs, num_heads]`.

    Args:
        q: `[num_seqs, num_heads, head_dim]`, not transformed.
        k_mean: float32 `[num_seqs, num_kv_heads, head_dim]`.
    """
    num_seqs, num_heads, head_dim = q.shape
    grouped = q.float().reshape(num_seqs, k_mean.shape[1], num_heads // k_mean.shape[1], head_dim)
    return sm_scale * (grouped * k_mean[:, :, None]).sum(-1).view(num_seqs, num_heads)
