"""Generation through the paged cache, beside stock transformers: the same tokens where nothing is lost, how long they agree
where something is, and how fast."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from pagedkv.bench.model_variants import Ensemble, exp_mean, median, with_interval
from pagedkv.integrations.transformers import PagedCache

PROMPTS = (1040, 300, 80, 12)  # tokens of each
QUICK_PROMPTS = (140, 30, 12)
NEW_TOKENS = 128
CONTINUED = 64  # tokens that lossy caches generate
SPEED_CONTEXT, SPEED_STEPS = 1024, 48


def prompts(ids: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Parts of a text, padded on the left: `input_ids` and `attention_mask`, int64 `[prompts, longest]`."""
    longest, stride = max(lengths), len(ids) // len(lengths)
    padded, mask = torch.zeros(len(lengths), longest, dtype=torch.int64), torch.zeros(len(lengths), longest, dtype=torch.int64)
    for i, length in enumerate(lengths):
        padded[i, longest - length :] = ids[i * stride : i * stride + length]
        mask[i, longest - length :] = 1
    return {"input_ids": padded, "attention_mask": mask}


def stock(model, inputs: dict[str, Tensor], new_tokens: int) -> Tensor:
    """What transformers generates greedily with SDPA and its own cache: int64 `[prompts, new_tokens]`."""
    model.set_attn_implementation("sdpa")
    return _greedy(model, inputs, DynamicCache(), new_tokens)


def _greedy(model, inputs: dict[str, Tensor], cache, new_tokens: int) -> Tensor:
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    options = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": 0}
    return model.generate(**inputs, past_key_values=cache, **options)[:, inputs["input_ids"].shape[1] :].cpu()


def exact(model, ids: Tensor, lengths: Sequence[int] = PROMPTS, new_tokens: int = NEW_TOKENS) -> tuple[dict, Tensor]:
    """A row that counts the tokens at which the unquantised paged cache agrees with stock transformers; and stock's tokens."""
    inputs = prompts(ids, lengths)
    want = stock(model, inputs, new_tokens)
    got = _greedy(model, inputs, PagedCache(model, "unquantised"), new_tokens)
    row = {"what": "exact", "prompts": len(lengths), "longest_prompt": max(lengths), "tokens": want.numel()}
    equal = int((got == want).sum())
    return {**row, "equal": equal, "share": equal / want.numel()}, want


def lossy() -> dict[str, dict]:
    """Options of `PagedCache` for each way to lose something. A budget is a share of the longest prompt."""
    evicting = {
        f"{policy} {1 - share:.0%} evicted": {"policy": policy, "budget": share}
        for policy in ("sinks_and_recency", "accumulated_attention")
        for share in (0.75, 0.5)
    }
    int8 = {name: {"spec": name} for name in ("block_head", "rotated_block_head", "k_mean_rotated_block_head")}
    both = {"accumulated_attention 50% evicted, int8": {"spec": "rotated_block_head", "policy": "accumulated_attention", "budget": 0.5}}
    return {**int8, **{name: {"spec": "unquantised", **options} for name, options in evicting.items()}, **both}


def continued(model, ids: Tensor, want: Tensor, lengths: Sequence[int] = PROMPTS, new_tokens: int = CONTINUED) -> Iterator[dict]:
    """A row for each lossy cache: greedy tokens before the first that differs from `want`, per prompt and on average."""
    caches = {}
    for name, options in lossy().items():
        if "budget" in options:
            options = {**options, "budget": round(options["budget"] * max(lengths))}
        caches[name] = PagedCache(model, **options)
    for name, got in zip(caches, together(model, prompts(ids, lengths), list(caches.values()), new_tokens), strict=True):
        same = (got == want[:, :new_tokens]).int().cumprod(1).sum(1)
        row = {
            "what": "continuation",
            "cache": name,
            "prompts": len(lengths),
            "tokens": new_tokens,
            "each": " ".join(map(str, same.tolist())),
        }
        yield {**row, **with_interval("same_tokens", same.double())}


@torch.inference_mode()
def together(model, inputs: dict[str, Tensor], caches: Sequence[PagedCache], new_tokens: int) -> Tensor:
    """What the model generates greedily on each cache, int64 `[caches, prompts, new_tokens]`.

    The prompts are read once, and the weights once a step, for all of them.
    """
    cache, (ids, mask) = Ensemble(model, caches), (inputs[name].to(model.device) for name in ("input_ids", "attention_mask"))
    position = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=position, past_key_values=cache, logits_to_keep=1).logits
    token, mask, position = (x.repeat(len(caches), 1) for x in (logits[:, -1:].argmax(-1), mask, position[:, -1:]))
    generated = [token]
    for _ in range(new_tokens - 1):
        mask, position = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), position + 1
        token = model(token, attention_mask=mask, position_ids=position, past_key_values=cache).logits[:, -1:].argmax(-1)
        generated.append(token)
    return torch.cat(generated, 1).view(len(caches), len(ids), new_tokens).cpu()


@torch.inference_mode()
def speed(
    model, ids: Tensor, context: int = SPEED_CONTEXT, steps: int = SPEED_STEPS, clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict]:
    """Rows of decode speed, one sequence, after a prompt of `context` tokens: stock and paged caches take turns at every step, so that what
    slows the machine slows each of them. The last rows have the ratio. Intervals are of a bootstrap over steps."""
    stock, paged = DynamicCache(), {spec: PagedCache(model, spec) for spec in ("unquantised", "block_head")}
    caches = {"stock": stock, **paged}
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    model.set_attn_implementation("sdpa")
    following = model(ids[None, :context].to(model.device), past_key_values=stock, logits_to_keep=1).logits[:, -1:].argmax(-1)
    for cache in paged.values():  # the prompt is read once
        for i, layer in enumerate(stock.layers):
            cache.store(i, layer.keys, layer.values, None)
        cache.finish(context)
    token = dict.fromkeys(caches, following)
    for step in range(steps + 4):
        for name, cache in caches.items():
            model.set_attn_implementation("sdpa" if name == "stock" else "pagedkv")
            _synchronise(model.device)
            started = clock()
            token[name] = model(token[name], past_key_values=cache).logits[:, -1:].argmax(-1)
            _synchronise(model.device)
            if step >= 4:  # the first steps warm up
                seconds[name].append(clock() - started)
    for name, times in seconds.items():
        quarter, _, three = statistics.quantiles(times, n=4)
        row = {"what": "speed", "cache": name, "context": context, "steps": steps, "p25_ms": 1e3 * quarter, "p75_ms": 1e3 * three}
        by_step = torch.tensor(times, dtype=torch.float64)
        yield {**row, **with_interval("p50_ms", 1e3 * by_step, median), **with_interval("tokens_per_s", by_step, lambda x: 1 / median(x))}
    for name in caches:
        if name != "stock":
            faster = torch.tensor([a / b for a, b in zip(seconds["stock"], seconds[name], strict=True)]).log()
            yield {"what": "speed_ratio", "cache": name, "context": context, **with_interval("vs_stock", faster, exp_mean)}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
