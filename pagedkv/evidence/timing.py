"""The one timer. Every time in a record was taken by `measure`, which says in which of four ways:

    graph   the calls are captured into one CUDA graph, one after another over several inputs (so that
            none finds its data in L2), and replayed: kernel time, with the launch overhead of a graph node
    flush   CUDA events around each call, L2 overwritten in between: what triton's do_bench does
    eager   CUDA events around each call as it is launched from Python, caches as the last call left them
    cpu     the host's clock around each call; on a CUDA device each call ends with a synchronisation

A figure is comparable only with figures of the same mode.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pagedkv.evidence import hardware

MODES = ("graph", "flush", "eager", "cpu")

_MIN_REPEATS = 3
_MAX_REPEATS = 500
_SAMPLE_S = 50e-6  # a host-clock sample holds enough calls to last this long
_GRAPH_S = 2e-3  # a graph holds enough calls to last about this long: its own launch (some 10 us) is then lost in it
GRAPH_MAX_CALLS = 512
_FLUSHES = 4  # writes of the L2-sized buffer before each call: about 250 us on a fast card
_CHUNK = 50  # events queued before the host waits: bounds both the queue and the overrun of the budget


def measure(
    fn: Callable[[], object] | None = None,
    device: str | torch.device = "auto",
    mode: str | None = None,
    *,
    rotate: Sequence[Callable[[], object]] | None = None,
    budget_s: float = 2.0,
    max_repeats: int = _MAX_REPEATS,
) -> dict:
    """Time `fn`, or the callables of `rotate` in turn (the same work on different inputs).

    `mode`: see the module; by default `graph` on CUDA and `cpu` on the CPU. About `budget_s` seconds are spent
    after one warm-up call on each input, but never fewer than three samples are taken.
    Returns `{p10_us, p50_us, p90_us, repeats, calls_per_repeat, mode}`: microseconds a call, over `repeats` samples.
    With `calls_per_repeat` above 1 a sample is the mean of that many calls.
    Raises `ValueError` for an unknown mode, a CUDA mode on the CPU, or nothing to call.
    """
    device = hardware.resolve(device)
    calls = list(rotate) if rotate is not None else [fn] if fn is not None else []
    if not calls:
        raise ValueError("measure: expected a callable or a non-empty `rotate`, got neither")
    mode = mode or ("graph" if device.type == "cuda" else "cpu")
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if mode != "cpu" and device.type != "cuda":
        raise ValueError(f"mode: {mode!r} needs a CUDA device, got {device}")
    if mode == "cpu":
        samples, per_repeat = _host_clock(calls, device, budget_s, max_repeats)
    else:
        with torch.cuda.device(device):
            if mode == "graph":
                samples, per_repeat = _graph(calls, budget_s, max_repeats)
            else:
                samples, per_repeat = _events(calls, device, budget_s, max_repeats, flush=mode == "flush"), 1
    p10, p50, p90 = (round(float(p), 3) for p in np.percentile(samples, (10, 50, 90)))
    return {"p10_us": p10, "p50_us": p50, "p90_us": p90, "repeats": len(samples), "calls_per_repeat": per_repeat, "mode": mode}


def _host_clock(calls: list, device: torch.device, budget_s: float, max_repeats: int) -> tuple[list[float], int]:
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for call in calls:
        call()
    synchronize()
    deadline = time.perf_counter() + budget_s
    begin = time.perf_counter()
    calls[0]()
    synchronize()
    estimate = time.perf_counter() - begin
    # Short calls are timed several at a time, whole rotations where there are several inputs.
    per_repeat = max(1, min(1000, int(_SAMPLE_S / max(estimate, 1e-7))))
    samples: list[float] = []
    turn = 0
    while len(samples) < _MIN_REPEATS or (len(samples) < max_repeats and time.perf_counter() < deadline):
        begin = time.perf_counter()
        for _ in range(per_repeat):
            calls[turn % len(calls)]()
            turn += 1
        synchronize()
        samples.append((time.perf_counter() - begin) * 1e6 / per_repeat)
    return samples, per_repeat


def _graph(calls: list, budget_s: float, max_repeats: int) -> tuple[list[float], int]:
    side = torch.cuda.Stream()  # capture wants the first calls (lazy initialisation, autotuning) made on another stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
        side.synchronize()
        deadline = time.perf_counter() + budget_s
        estimate_s = _timed(calls[0]) / 1e3
    torch.cuda.current_stream().wait_stream(side)

    # Launched one by one from Python, a short call seems longer than it is; what a first graph says is believed.
    rounds = _rounds(estimate_s, len(calls))
    graph = _captured(calls, rounds)
    better = _rounds(_timed(graph.replay) / 1e3 / (rounds * len(calls)), len(calls))
    if better > rounds:
        graph.reset()
        rounds = better
        graph = _captured(calls, rounds)
    samples = _sample(graph.replay, deadline, max_repeats, before=None)
    graph.reset()
    return [s / (rounds * len(calls)) for s in samples], rounds * len(calls)


def _rounds(call_s: float, inputs: int) -> int:
    """How often a graph goes through all inputs (whole rotations, so that each counts the same) to last `_GRAPH_S`."""
    return max(1, round(min(GRAPH_MAX_CALLS, _GRAPH_S / max(call_s, 1e-7)) / inputs))


def _captured(calls: list, rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _events(calls: list, device: torch.device, budget_s: float, max_repeats: int, flush: bool) -> list[float]:
    before = None
    if flush:
        # At least 256 MB, as do_bench takes. Written several times over, since the write is also what the GPU does while Python
        # queues the two events and the call between them: 256 MB take a fast card 60 us, an op from Python 40 us, a baseline of
        # several ops more. An event that the GPU reaches before the call is queued would time the host.
        buffer = torch.empty(max(256 << 20, 4 * hardware.l2_bytes(device)), dtype=torch.int8, device=device)

        def before() -> None:
            for _ in range(_FLUSHES):
                buffer.zero_()

    for call in calls:
        call()
    torch.cuda.synchronize()
    turn = itertools.cycle(calls)
    return _sample(lambda: next(turn)(), time.perf_counter() + budget_s, max_repeats, before=before)


def _sample(launch: Callable, deadline: float, max_repeats: int, before: Callable | None) -> list[float]:
    """Microseconds of each launch on the current stream, until the deadline; `before` is not timed."""
    samples: list[float] = []
    chunk = _MIN_REPEATS
    while len(samples) < _MIN_REPEATS or (len(samples) < max_repeats and time.perf_counter() < deadline):
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(chunk)]
        begin = time.perf_counter()
        for start, end in pairs:
            if before is not None:
                before()
            start.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        samples += [start.elapsed_time(end) * 1e3 for start, end in pairs]
        each = (time.perf_counter() - begin) / len(pairs)
        chunk = max(1, min(_CHUNK, max_repeats - len(samples), int((deadline - time.perf_counter()) / max(each, 1e-6))))
    return samples


def _timed(call: Callable) -> float:
    """Milliseconds of one call by events on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
