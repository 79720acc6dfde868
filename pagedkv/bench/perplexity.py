"""Perplexity of a model whose context lies in a compressed cache, every scheme on the same tokens in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pagedkv.bench.model_variants import Ensemble, RoundedSpec, Scores, Sizes, summaries, teacher_forced
from pagedkv.bench.schemes import round_to_fp8
from pagedkv.integrations.transformers import PagedCache
from pagedkv.quant_spec import KV_SPECS, KVQuantSpec

BLOCK_SIZE = 16
SIZES = {"cpu": Sizes(32, 256, 64, together=32), "cuda": Sizes(96, 256, 128, together=48)}  # the text has room for 102 of the latter
QUICK_SIZES = Sizes(2, 256, 64, together=2)
MOST_PERCENT = 51.6  # of float16's bytes: what a scale for each token and head takes at head_dim 128


def schemes() -> dict[str, KVQuantSpec]:
    """`float32` first: what the others are compared with. Then the yardstick, every scheme of the library, and the peer's format."""
    return {
        "float32": KV_SPECS["unquantised"],
        "float16": RoundedSpec(rounding=lambda x: x.half().float()),
        **{name: spec for name, spec in KV_SPECS.items() if name != "unquantised"},
        "fp8_e4m3_token_head": RoundedSpec(rounding=round_to_fp8),
    }


def percent_of_fp16(name: str, spec: KVQuantSpec, num_kv_heads: int, head_dim: int) -> float:
    """Bytes a token takes, scales included, of those of a float16 cache; a K mean, one vector a sequence, is not counted."""
    if name == "float32" or name.endswith("unquantised"):
        return 200.0
    if name == "float16":
        return 100.0
    if isinstance(spec, RoundedSpec):  # a byte a value and a float32 scale for each token and head
        spec = KVQuantSpec("token_head")
    shape = (BLOCK_SIZE, num_kv_heads, head_dim)
    return 100 * spec.bytes_per_token(*shape) / KVQuantSpec(None).bytes_per_token(*shape)


def measure(model, ids: Tensor, sizes: Sizes, say: Callable[[str], None] = print) -> Iterator[dict]:
    """A row for each scheme, over windows of a text `ids` `[tokens]`."""
    config = model.config.get_text_config(decoder=True)
    heads, head_dim = config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    specs, parts = schemes(), []
    blocks = -(-(sizes.context + sizes.scored) // BLOCK_SIZE)  # of a window; a pool that grew would be copied each time
    for prompts, following in sizes.batches(ids.to(model.device)):
        pools = {"block_size": BLOCK_SIZE, "num_blocks": len(prompts) * blocks}
        cache = Ensemble(model, [PagedCache(model, spec, **pools) for spec in specs.values()])
        with torch.inference_mode():
            model(prompts, past_key_values=cache, logits_to_keep=1)
        parts.append(teacher_forced(model, cache, following, len(specs), say))
        cache.drop()
        say(f"  {sum(part.nll.shape[1] for part in parts)} of {sizes.windows} windows")
    for row, (name, spec) in zip(summaries(Scores.join(parts), list(specs)), specs.items(), strict=True):
        yield {"context": sizes.context, "percent_of_fp16": percent_of_fp16(name, spec, heads, head_dim), **row}


def best_int8(rows: Sequence[dict]) -> dict:
    """Of the INT8 schemes within 51.6 % of float16's bytes, the row of the one with the least KL, beside block-head's and FP8's."""
    by_name = {row["variant"]: row for row in rows}
    within = [row for name, row in by_name.items() if name in KV_SPECS and row["percent_of_fp16"] <= MOST_PERCENT]
    best = min(within, key=lambda row: row["kl"])
    fp8, plain = by_name["fp8_e4m3_token_head"], by_name["block_head"]
    return {
        **best,
        "delta_percent_abs": abs(best["delta_percent"]),
        "kl_vs_fp8": best["kl"] / fp8["kl"],
        "block_head_delta_percent": plain["delta_percent"],
        "block_head_kl": plain["kl"],
        "fp8_kl": fp8["kl"],
    }
