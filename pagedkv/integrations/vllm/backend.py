"""The backend as vLLM wants it: what it supports, the metadata of a batch, and the calls of an attention layer.

The interface of 0.26 and 0.27 asks for the cache's shape (`get_kv_cache_shape`); from 0.29 on the engine derives it from the page's
specification (`customize_spec`, `supported_kv_cache_layouts`). This class answers both.
"""

from __future__ import annotations

import dataclasses
import itertools
import os

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

import pagedkv
from pagedkv.integrations.vllm.pages import SCALE_BYTES, Pages
from pagedkv.integrations.vllm.prefill import Piece, Prefill, to_device
from pagedkv.ops.checks import GRANULARITIES, MAX_HEAD_DIM

logger = init_logger(f"vllm.{__name__}")  # vLLM prints what is logged under its own name

INT8 = "int8_per_token_head"  # vLLM's name for a cache of one byte an element with float32 scales, by which it sizes pages
UNQUANTISED = "none"
# So few new tokens after so long a context each read the cache, as a decode does: cheaper than to decode that context once, and the new
# tokens' own rounding is lost among it.
FEW_TOKENS, LONG_CONTEXT = 16, 512


class PagedKVBackend(AttentionBackend):
    """INT8 (or unquantised) paged attention for decoder models, by the kernels of this package."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  (as the base class declares them)
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", INT8]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedKVImpl]:
        return PagedKVImpl

    @staticmethod
    def get_builder_cls() -> type[PagedKVMetadataBuilder]:
        return PagedKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int]:
        return [16, 32, 64, 128, 256]  # the fast kernels want multiples of 16; another multiple is handed over in parts of such a size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # not tried

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability >= (7, 5)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """0.26, 0.27. Only the number of a page's bytes matters: `Pages` says where what lies."""
        return num_blocks, block_size, num_kv_heads, 2 * (head_size + (SCALE_BYTES if cache_dtype_str == INT8 else 0))

    @classmethod
    def customize_spec(cls, spec):
        """From 0.29 on: the bytes of a token and head, by which the engine sizes pages."""
        if not spec.kv_quant_mode.is_per_token_head:
            return spec
        return dataclasses.replace(spec, state_content_bytes=2 * (spec.head_size + SCALE_BYTES))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        """From 0.29 on: those whose page is one stretch of memory."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC


@dataclasses.dataclass
class PagedKVMetadata:
    """A batch: tokens that are attended from over the cache alone come first, one a row; then `pieces` of prompts."""

    num_rows: int
    block_table: Tensor  # int32 [num_rows, max_blocks]
    seq_lens: Tensor  # int32 [num_rows]: up to and with the row's token
    pieces: list[Piece]


class PagedKVMetadataBuilder(AttentionMetadataBuilder[PagedKVMetadata]):
    # A step of single tokens is the same launches whatever the lengths, which the kernels read on the device.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # asks the engine to put decodes first

    def __init__(self, kv_cache_spec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        """Raises `NotImplementedError`, at start-up, for layers that attend to other tokens than a decoder's do."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        kind = type(kv_cache_spec).__name__
        _refuse(
            {
                kind: kind not in ("FullAttentionSpec", "SlidingWindowSpec"),
                "attention that is not causal": getattr(kv_cache_spec, "non_causal", False),
                "attention within chunks": getattr(kv_cache_spec, "attention_chunk_size", None) is not None,
            }
        )

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> PagedKVMetadata:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise NotImplementedError("pagedkv's vLLM backend: attention that is not causal")
        tables, seq_lens = batch.block_table_tensor, batch.seq_lens
        if batch.max_query_len <= 1:
            return PagedKVMetadata(batch.num_reqs, tables[: batch.num_reqs], seq_lens[: batch.num_reqs], [])
        starts = batch.query_start_loc_cpu.tolist()
        lengths = [end - begin for begin, end in itertools.pairwise(starts)]
        # On the host and, for requests with several new tokens, exact; reading seq_lens would wait for the device.
        ends = batch.seq_lens_cpu_upper_bound if batch.seq_lens_cpu_upper_bound is not None else batch.seq_lens.cpu()
        contexts = [end - length for end, length in zip(ends.tolist(), lengths, strict=False)]
        few = next((i for i, pair in enumerate(zip(lengths, contexts, strict=False)) if not _reads_the_cache(*pair)), len(lengths))
        pieces = [Piece(starts[row], starts[row + 1], contexts[row], tables[row]) for row in range(few, batch.num_reqs) if lengths[row]]
        if starts[few] == few:
            return PagedKVMetadata(few, tables[:few], seq_lens[:few], pieces)
        request = [row for row in range(few) for _ in range(lengths[row])]
        tokens_after = [left for length in lengths[:few] for left in reversed(range(length))]
        request, tokens_after = to_device([request, tokens_after], seq_lens.device)
        return PagedKVMetadata(starts[few], tables.index_select(0, request), seq_lens.index_select(0, request) - tokens_after, pieces)


def _refuse(refused: dict[str, bool]) -> None:
    """Raise an error that names all of what is true. An engine shows it when it starts."""
    asked = [what for what, is_asked in refused.items() if is_asked]
    if asked:
        raise NotImplementedError(f"pagedkv's vLLM backend does not support: {'; '.join(asked)}")


def _reads_the_cache(length: int, context: int) -> bool:
    return length == 1 or (1 < length <= FEW_TOKENS and context >= LONG_CONTEXT)


class PagedKVImpl(AttentionImpl[PagedKVMetadata]):
    """One attention layer.

    Raises:
        NotImplementedError: at start-up, naming all that the model or the configuration asks for and this backend lacks.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others,
    ) -> None:
        config = get_current_vllm_config()
        # All of it, also what vLLM asks `PagedKVBackend` before: its CPU platform does not ask.
        model, parallel, dtype = config.model_config, config.parallel_config, config.model_config.dtype
        _refuse(
            {
                f"head_dim {head_size} (wanted: a multiple of 8, at most {MAX_HEAD_DIM})": not PagedKVBackend.supports_head_size(head_size),
                f"--dtype {str(dtype).removeprefix('torch.')}": dtype not in PagedKVBackend.supported_dtypes,
                f"--kv-cache-dtype {kv_cache_dtype} (wanted: none or {INT8}, or float16, bfloat16 for a cache that is not quantised)": (
                    kv_cache_dtype not in PagedKVBackend.supported_kv_cache_dtypes
                ),
                # Such a layer is told "auto", as every layer is where the command line names no dtype.
                "--kv-cache-dtype-skip-layers": bool(getattr(config.cache_config, "kv_cache_dtype_skip_layers", None)),
                "ALiBi": alibi_slopes is not None,
                f"{getattr(attn_type, 'value', attn_type)} attention": attn_type != AttentionType.DECODER,
                "attention that is not causal": getattr(config.attention_config, "use_non_causal", False),
                "attention both ways within a prefix": getattr(model, "is_mm_prefix_lm", False),
                "MLA": getattr(model, "use_mla", False),
                "layers that share a KV cache": kv_sharing_target_layer_name is not None,
                "a KV connector": config.kv_transfer_config is not None,
                "speculative decoding": config.speculative_config is not None,  # lengths on the host are then guesses
                "decode context parallelism": parallel.decode_context_parallel_size > 1,
                "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
                "VLLM_BATCH_INVARIANT": getattr(envs, "VLLM_BATCH_INVARIANT", False),  # splits follow from the batch's shape
                **{name: value not in (None, False, -1) for name, value in others.items()},
            }
        )
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.prefill = Prefill(self.scale, sliding_window, logits_soft_cap or None, sinks, _flash_version(config, sinks))
        self.granularity = os.environ.get("PAGEDKV_VLLM_SCALES", "token_head")
        expected = GRANULARITIES if kv_cache_dtype == INT8 else (*GRANULARITIES, UNQUANTISED)
        if self.granularity not in expected:
            raise ValueError(f"PAGEDKV_VLLM_SCALES: expected {' or '.join(expected)}, got {self.granularity!r}")
        self._config = config
        self._makes_int8 = kv_cache_dtype == "auto" and self.granularity != UNQUANTISED
        self.in_kernel = _rotates_in_kernel(head_size, config.model_config.dtype)
        self.max_model_len = config.model_config.max_model_len
        self._buffer: Tensor | None = None
        self._pages: Pages | None = None
        kernels = pagedkv.backend(current_platform.device_type)  # compiles them if need be: here, not within a graph's capture
        is_int8 = self._makes_int8 or kv_cache_dtype == INT8
        cache = f"INT8 cache, {self.granularity} scales" if is_int8 else "unquantised cache"
        logger.info_once("PagedKV attention %s is in use: %s, %s", pagedkv.__version__, cache, kernels)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Have the layer's cache be INT8 where the command line leaves its dtype open.

        This is the last call before the engine asks layers for the size of their pages. What is set here vLLM sets itself, in layer and
        configuration, for a checkpoint that brings an FP8 cache.
        """
        for layer in self._config.compilation_config.static_forward_context.values():
            if getattr(layer, "impl", None) is self:
                value_size = getattr(layer, "head_size_v", self.head_size)  # which a layer does not tell its implementation
                _refuse({f"values of another size, {value_size}, than keys, {self.head_size}": value_size != self.head_size})
                if self._makes_int8:
                    self._config.cache_config.cache_dtype = INT8
                    layer.kv_cache_dtype, layer.kv_cache_torch_dtype = INT8, torch.int8

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """key, value: `[num_tokens, num_kv_heads, head_dim]`; slot_mapping: int64, negative where a token is padding."""
        n = slot_mapping.shape[0]
        self._view(kv_cache).write(key[:n], value[:n], slot_mapping)

    def forward(
        self,
        layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedKVMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output: `[num_tokens, num_heads, head_dim]`. The new tokens are in the cache already."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("pagedkv's vLLM backend: output quantisation fused into attention")
        if attn_metadata is None:  # a run that only measures memory: what a prompt takes that ends at the longest context
            key.new_empty(2, self.max_model_len, *key.shape[1:])
            return output.fill_(0)
        batch, pages = attn_metadata, self._view(kv_cache)
        if n := batch.num_rows:
            output[:n] = pages.decode(query[:n], batch.block_table, batch.seq_lens, self.scale, **self.prefill.options)
        self.prefill(query, key, value, pages, batch.pieces, output)
        return output

    def _view(self, kv_cache: Tensor) -> Pages:
        """`kv_cache` as pages: made once, for as long as the engine brings the same tensor."""
        if kv_cache is not self._buffer:
            elements = kv_cache.shape[1:].numel()
            per_token = 2 * self.num_kv_heads * (self.head_size + (SCALE_BYTES if kv_cache.dtype == torch.int8 else 0))
            self._pages = Pages.view(kv_cache, elements // per_token, self.num_kv_heads, self.head_size, self.granularity, self.in_kernel)
            self._buffer = kv_cache
        return self._pages


def _rotates_in_kernel(head_size: int, dtype: torch.dtype) -> bool:
    """Whether tensor cores serve decode (see kernels/cuda/attention/launch.cuh): there rotation costs nothing, elsewhere a faster path."""
    if not current_platform.is_cuda():
        return False
    return current_platform.has_device_capability(80) and head_size in (64, 128, 256) and dtype != torch.float32


def _flash_version(config: VllmConfig, sinks: Tensor | None) -> int | None:
    """Of the FlashAttention that vLLM brings; None where there is none, or it cannot take the model's dtype or sinks."""
    if not current_platform.is_cuda() or not current_platform.has_device_capability(80) or config.model_config.dtype == torch.float32:
        return None
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version()
    return None if version is None or (sinks is not None and version < 3) else version
