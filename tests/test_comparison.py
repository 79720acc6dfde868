"""What the comparisons share: who is measured, what is left of one that cannot run, what the others are compared with."""

import gc
import weakref

import pytest
import torch

from pagedkv.bench import append, attention_peers, comparison, eviction
from pagedkv.bench.comparison import Absent, Implementation, compare
from pagedkv.bench.inputs import PagedInputs, shape

CPU = torch.device("cpu")


def compared(error=None, forget=lambda: None, **options):
    def measured(_):
        yield {"p50_us": 1.0}
        if error is not None:
            raise error

    rows = compare([Implementation("it", **options)], CPU, {"kind": "any"}, measured, forget)
    return [(row["status"], row.get("reason")) for row in rows]


def test_memory_is_given_back_and_what_is_for_another_device_left_out():
    forgotten = []
    assert compared(forget=lambda: forgotten.append(1)) == [("measured", None)] and forgotten == [1]
    assert compared(devices=("cuda",)) == []


def test_what_refers_to_itself_is_given_back_too_before_the_next_and_nothing_stays_frozen():
    alive, seen = weakref.WeakSet(), []

    class Buffer:
        def __init__(self):
            self.itself = self
            alive.add(self)

    def measured(_):
        seen.append(len(alive))
        Buffer()
        yield {}

    frozen = gc.get_freeze_count()
    assert len(list(compare([Implementation("one"), Implementation("two")], CPU, {}, measured))) == 2
    assert seen == [0, 0] and not alive
    assert gc.get_freeze_count() <= frozen


def test_who_cannot_run_is_absent():
    for error, reason in ((Absent("not here"), "not here"), (torch.cuda.OutOfMemoryError(), "needs more memory than this device has")):
        assert compared(error) == compared(error, ours=True) == [("absent", reason)]


@pytest.mark.parametrize("message", ["", "no such kernel\nsecond line"])
def test_a_peer_that_breaks_is_absent_and_what_we_break_is_an_error(message):
    assert compared(RuntimeError(message)) == [("absent", f"RuntimeError: {message[:14]}")]
    with pytest.raises(RuntimeError):
        compared(RuntimeError(message), ours=True)


def test_a_missing_flashinfer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: None)
    inputs = {
        attention_peers: lambda i: (PagedInputs(shape("3x40"), CPU, num_rotations=1), i.kv_dtype),
        append: lambda i: (append.Inputs(80, CPU, rotations=1), i.kv_dtype),
        eviction: lambda i: (eviction.Statistics.random(100, CPU), 10),
    }
    for benchmark, arguments in inputs.items():
        peers = [i for i in benchmark.IMPLEMENTATIONS if i.name.startswith("FlashInfer")]
        assert peers
        for peer in peers:
            with pytest.raises(Absent, match="pip install"):
                peer.prepare(*arguments(peer))
