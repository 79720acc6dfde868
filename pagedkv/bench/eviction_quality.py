"""What a model forgets when blocks of its cache are evicted: perplexity, agreement and a planted fact, by policy and share evicted.

The prompt is read whole, then a share of its blocks goes, then the text goes on through the decode kernel. Every variant starts as a
fork of the same prompt, so that one pool holds them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pagedkv.bench.kvpress_peer import PressCache
from pagedkv.bench.model_variants import Ensemble, Scores, Sizes, exp_mean, summaries, teacher_forced, with_interval
from pagedkv.integrations.transformers import PagedCache
from pagedkv.ops.eviction import select_eviction_candidates
from pagedkv.policies import REGISTRY
from pagedkv.policies import policy as find_policy
from pagedkv.quant_spec import KV_SPECS

BLOCK_SIZE = 16
SIZES = {"cpu": Sizes(8, 512, 16, together=8), "cuda": Sizes(64, 512, 64, together=16)}  # the text has room for 68 of the latter
QUICK_SIZES = Sizes(2, 512, 16, together=2)
WATCH = 32  # the prompt's last queries, whose attention the decode kernel adds up
PROTECT_FIRST, PROTECT_LAST = 1, WATCH // BLOCK_SIZE  # blocks that no policy may take: the sinks, and those of the watched queries
FRACTIONS = (0.10, 0.25, 0.50, 0.75)
INT8_SPEC = "rotated_block_head"  # keeps norms and angles of K, which some policies look at; those that look at channels are left out
STREAMING = "sinks_and_recency"  # what the others are compared with
BY_LAYER = ("accumulated_attention", "last_query_attention")  # also with a choice for each layer


@dataclasses.dataclass(frozen=True)
class Variant:
    """A cache after eviction. `policy` None: nothing is evicted."""

    policy: str | None
    fraction: float = 0.0
    cache: str = "float32"
    choice: str = "model"  # one choice for the model, for each layer, or for each layer and head

    @property
    def name(self) -> str:
        kind = "" if self.cache == "float32" else f" {self.cache}"
        return f"{self.policy or 'everything'}{' by ' + self.choice if self.choice != 'model' else ''} {self.fraction:.0%}{kind}"


def plan(presses: Sequence[str]) -> list[list[Variant]]:
    """The variants of each member of the ensemble, in its order; the first of all evicts nothing."""
    one_choice = [Variant(None), *(Variant(policy, fraction) for policy in REGISTRY for fraction in FRACTIONS)]
    return [
        one_choice,
        [Variant(policy, fraction, choice="layer") for policy in BY_LAYER for fraction in FRACTIONS],
        [dataclasses.replace(variant, cache="int8") for variant in one_choice if on_int8(variant.policy)],
        [Variant(f"kvpress {press}", fraction, choice="layer and head") for press in presses for fraction in FRACTIONS],
    ]


def on_int8(policy: str | None) -> bool:
    return policy is None or find_policy(policy).obstacle(KV_SPECS[INT8_SPEC]) is None


def members(model, variants: Sequence[Sequence[Variant]], presses: dict) -> list:
    options = {"block_size": BLOCK_SIZE, "watch": WATCH}
    caches = [
        PagedCache(model, "unquantised", **options),
        PagedCache(model, "unquantised", evict_by_layer=True, **options),
        PagedCache(model, INT8_SPEC, **options),
    ]
    return [*caches, PressCache(model, presses, FRACTIONS)] if presses else caches


def part(cache: PagedCache, variants: Sequence[Variant]) -> None:
    """After the prompt: the batch becomes one of each variant for each row, and each variant's blocks go."""
    rows = len(cache.seqs)
    choices = {}
    for table in range(len(cache.mass)):
        for policy in dict.fromkeys(v.policy for v in variants if v.policy):
            choices[table, policy] = cache.scores(find_policy(policy), table)
    cache.watch = 0  # nothing more is evicted, so nothing more is asked
    cache.choose([row for _ in variants for row in range(rows)])
    for i, variant in enumerate(variants):
        for row in range(rows if variant.policy else 0):
            for table in range(len(cache.mass)):
                blocks = cache.kv.length(cache.seqs[i * rows + row], table) // BLOCK_SIZE
                evictable = choices[table, variant.policy][row, PROTECT_FIRST : blocks - PROTECT_LAST]
                lowest = select_eviction_candidates(evictable.float().contiguous(), min(round(variant.fraction * blocks), len(evictable)))
                cache.evict(i * rows + row, (lowest + PROTECT_FIRST).tolist(), table)


def prompted(model, prompts: Tensor, variants: Sequence[Sequence[Variant]], presses: dict) -> Ensemble:
    """Every variant's cache, after the prompts `[rows, tokens]` and the eviction."""
    cache = Ensemble(model, members(model, variants, presses))
    with torch.inference_mode():
        model(prompts, past_key_values=cache, logits_to_keep=1)
    for member, mine in zip(cache.members, variants, strict=False):
        if isinstance(member, PagedCache):
            part(member, mine)
    return cache


# -------------------------------------------------------------------------------------------------------------------- measurements


def continuation(model, ids: Tensor, presses: dict, sizes: Sizes, say: Callable[[str], None] = print) -> Iterator[dict]:
    """A row for each variant: perplexity and agreement over what follows prompts of a text `ids` `[tokens]`.

    `vs_streaming`, `vs_kvpress`: perplexity over that of sinks + recency and of kvpress's best rule at the same fraction; `vs_float32`,
    of a row on an INT8 cache: over that of the same policy and fraction without INT8.
    """
    variants = plan(list(presses))
    flat = [variant for mine in variants for variant in mine]
    parts = []
    for prompts, following in sizes.batches(ids.to(model.device)):
        cache = prompted(model, prompts, variants, presses)
        parts.append(teacher_forced(model, cache, following, len(flat), say))
        cache.drop()
        say(f"  {sum(part.nll.shape[1] for part in parts)} of {sizes.windows} windows")
    scores = Scores.join(parts)
    nll = scores.nll.mean(2)
    others = yardsticks(flat, nll)
    for variant, mine, row in zip(flat, nll, summaries(scores, [v.name for v in flat]), strict=True):
        for name, other in others.get(variant.fraction, {}).items():
            row |= with_interval(name, mine - other, exp_mean)
        if variant.cache == "int8":
            row |= with_interval("vs_float32", mine - nll[flat.index(dataclasses.replace(variant, cache="float32"))], exp_mean)
        yield {"what": "continuation", "context": sizes.context, **dataclasses.asdict(variant), **row}


def yardsticks(variants: Sequence[Variant], nll: Tensor) -> dict[float, dict[str, Tensor]]:
    """What the others are compared with at each fraction: sinks + recency, and the best of kvpress's rules.

    `nll`: float32 `[variants, windows]`, each window's mean; the result's are rows of it.
    """
    found: dict[float, dict[str, Tensor]] = {}
    for fraction in FRACTIONS:
        here = {v.policy: mine for v, mine in zip(variants, nll, strict=True) if (v.fraction, v.cache) == (fraction, "float32")}
        peers = [mine for policy, mine in here.items() if policy.startswith("kvpress")]
        found[fraction] = {"vs_streaming": here[STREAMING]}
        if peers:
            found[fraction]["vs_kvpress"] = min(peers, key=lambda mine: float(mine.mean()))
    return found


def best_at(rows: Sequence[dict], fraction: float) -> dict:
    """At one fraction, this library's policy of lowest perplexity on a float32 cache, against sinks + recency and the peer's best.

    `vs_...`: perplexity over theirs, below 1 where the policy is better; intervals are paired, and do not know that the best was chosen
    on the same tokens.
    """
    here = [row for row in rows if row["fraction"] == fraction and row["cache"] == "float32"]
    peers = [row for row in here if row["policy"].startswith("kvpress")]
    ours = [row for row in here if row not in peers and row["policy"] != STREAMING]
    (streamed,) = [row for row in here if row["policy"] == STREAMING]
    best, peer = (min(group, key=lambda row: row["perplexity"], default=None) for group in (ours, peers))
    fields = ("variant", "policy", "choice", "fraction", "tokens", "windows", "perplexity")
    ratios = [name + end for name in ("vs_streaming", "vs_kvpress") for end in ("", "_low", "_high")]
    return {
        **{name: best[name] for name in fields},
        **{name: best.get(name) for name in ratios},
        "streaming_perplexity": streamed["perplexity"],
        "kvpress_best": None if peer is None else peer["policy"],
        "kvpress_perplexity": None if peer is None else peer["perplexity"],
    }


def verdict(best: dict) -> str:
    """`best_at` as a sentence that claims no more than its intervals."""

    def against(field: str, other: str) -> str:
        ratio, low, high = (best[field + end] for end in ("", "_low", "_high"))
        kind = "better than" if high < 1 else "worse than" if low > 1 else "not distinguishable from"
        return f"{kind} {other}: {ratio:.4f} times its perplexity ({low:.4f} to {high:.4f})"

    text = f"**{best['variant']}**, the best of this library's on these tokens, is {against('vs_streaming', 'sinks and recency')}"
    if best["kvpress_best"] is not None:
        text += f"; and {against('vs_kvpress', best['kvpress_best'])}, which chooses tokens for each head"
    return text + "."


def panels(rows: Sequence[dict]) -> dict[str, list[list[dict]]]:
    """Rows as a figure's panels, by title: of each the lines, one for each policy (or rule of kvpress) and choice, by fraction."""
    found: dict[str, dict[tuple, list[dict]]] = {}
    for row in rows:
        if row["policy"]:
            title = "kvpress" if row["policy"].startswith("kvpress") else f"{row['cache']} cache"
            found.setdefault(title, {}).setdefault((row["policy"], row["choice"]), []).append(row)
    return {title: list(lines.values()) for title, lines in found.items()}


@dataclasses.dataclass(frozen=True)
class Needle:
    """A fact planted at `depth` (0 the start, 1 the end) of a prompt of `length` tokens."""

    depth: float
    length: int


DEPTHS = [i / 9 for i in range(10)]
NEEDLES = {  # on the CPU mostly short, since a prompt's cost is its length: depth and length are confounded there
    "cpu": [Needle(*place) for place in zip(DEPTHS, (1024, 1024, 2048, 1024, 1024, 4096, 1024, 2048, 1024, 1024), strict=True)],
    "cuda": [Needle(depth, length) for length in (1024, 2048, 4096) for depth in DEPTHS],
}
QUICK_NEEDLES = [Needle(0.5, 256)]
NEEDLE_TOKENS = {"cpu": 4096, "cuda": 8192}  # of the prompts in one batch: what a rule of kvpress keeps, every variant holds for itself


def needles(model, tokenizer, ids: Tensor, presses: dict, planted: Sequence[Needle], say: Callable[[str], None] = print) -> Iterator[dict]:
    """A row for each variant: the share of planted facts that the model states, all tokens of the answer its first choice.

    The question comes after the eviction, so that no policy can know it.
    """
    variants = plan(list(presses))
    flat = [variant for mine in variants for variant in mine]
    question = tokens(tokenizer, "\nNow remember: the number of the blue door is")
    order, found, nll = [], [], []
    for batch in batches(planted, NEEDLE_TOKENS[model.device.type]):
        answers = torch.stack([tokens(tokenizer, f" {number(i)}") for i in batch])
        prompts = torch.stack([prompt(tokenizer, ids, planted[i], number(i)) for i in batch])
        cache = prompted(model, prompts.to(model.device), variants, presses)
        asked = torch.cat([question.expand(len(batch), -1), answers[:, :-1]], 1).to(model.device)
        with torch.inference_mode():
            logits = model(asked.repeat(len(flat), 1), past_key_values=cache, logits_to_keep=answers.shape[1]).logits
        cache.drop()
        log_p, target = logits.float().log_softmax(-1), answers.to(model.device).repeat(len(flat), 1)
        found.append((log_p.argmax(-1) == target).all(1).float().view(len(flat), -1).cpu())
        nll.append(-log_p.gather(2, target[..., None])[..., 0].mean(1).view(len(flat), -1).cpu())
        order += batch
        say(f"  {len(order)} of {len(planted)} needles")
    as_planted = torch.tensor(order).argsort()
    found, nll = (torch.cat(parts, 1)[:, as_planted] for parts in (found, nll))
    for variant, hits, losses in zip(flat, found, nll, strict=True):
        row = {"what": "needle", **dataclasses.asdict(variant), "variant": variant.name, "needles": len(planted)}
        yield {**row, **with_interval("found", hits), **with_interval("answer_nll", losses), "found_at": depths(planted, hits)}


def batches(planted: Sequence[Needle], at_most: int) -> Iterator[list[int]]:
    """Which needles share a batch: those of one length, as many as have `at_most` tokens together, one at least."""
    for length in dict.fromkeys(needle.length for needle in planted):
        alike = [i for i, needle in enumerate(planted) if needle.length == length]
        each = max(1, at_most // length)
        yield from (alike[i : i + each] for i in range(0, len(alike), each))


def number(i: int) -> int:
    """What the needle `i` says: four digits, so that all are as many tokens."""
    return (7919 * (i + 1)) % 9000 + 1000


def prompt(tokenizer, ids: Tensor, needle: Needle, number: int) -> Tensor:
    """The first tokens of a text `ids`, and the fact among them: int64 `[needle.length]`."""
    fact = tokens(tokenizer, f"\nThe number of the blue door is {number}.\n")
    start, end = round(needle.depth * (needle.length - len(fact))), needle.length - len(fact)
    return torch.cat([ids[:start], fact, ids[start:end]])


def depths(planted: Sequence[Needle], hits: Tensor) -> str:
    return " ".join(f"{needle.depth:.0%}/{needle.length}" for needle, hit in zip(planted, hits, strict=True) if hit)


def tokens(tokenizer, text: str) -> Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
