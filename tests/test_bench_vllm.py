"""What the vLLM experiment computes from an engine, on engines that are made up: no vLLM is needed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from pagedkv.bench import vllm_engine, vllm_throughput
from pagedkv.bench.comparison import Absent
from pagedkv.bench.vllm_engine import Answer


def test_every_token_of_the_reference_is_compared_after_the_same_text(monkeypatch):
    """The engine says 9 where the reference says 7, once: it is asked again with the reference's text."""
    asked = []

    def greedy(llm, prompts, counts):
        asked.append([(tuple(p), n) for p, n in zip(prompts, counts, strict=True)])
        answers = []
        for prompt, n in zip(prompts, counts, strict=True):
            tokens = [5, 9, 5, 5][:n] if len(prompt) == 2 else [8] * n
            answers.append(Answer(tokens, [{5: -0.1, 7: -0.9, 8: -0.4, 9: -0.8} for _ in tokens]))
        return answers

    monkeypatch.setattr(vllm_engine, "greedy", greedy)
    reference = [Answer([5, 7, 8, 8], [{5: -0.1}, {7: -0.5}, {8: -0.4}, {8: -0.3}])]
    deltas = vllm_engine.logprob_deltas(None, [[1, 2]], reference)
    assert deltas == pytest.approx([0, -0.4, 0, -0.1])
    assert asked == [[((1, 2), 4)], [((1, 2, 5, 7), 2)]]


def test_a_token_that_is_no_candidate_is_no_small_difference(monkeypatch):
    monkeypatch.setattr(vllm_engine, "greedy", lambda *_: [Answer([9], [{9: -0.1}])])
    with pytest.raises(KeyError):
        vllm_engine.logprob_deltas(None, [[1]], [Answer([7], [{7: -0.1}])])


def test_without_vllm_the_reason_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_engine, "find_root", lambda: tmp_path)
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Absent, match="make vllm"):
        vllm_engine.elsewhere("cpu", tmp_path / "engine", [], {})


def test_the_environment_of_make_vllm_goes_first(monkeypatch, tmp_path):
    python = tmp_path / "build" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(vllm_engine, "find_root", lambda: tmp_path)
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)
    assert vllm_engine.interpreter("cpu") == python
    with pytest.raises(Absent, match="pip install vllm"):
        vllm_engine.interpreter("cuda")  # that environment holds vLLM for the CPU


class Engine:
    """Reads one prompt a step, and makes a token of each that is read."""

    def __init__(self):
        self.requests, self.read, self.steps = [], 0, 0

    def add_request(self, name, prompt, sampling):
        self.requests.append(name)

    def step(self):
        self.steps += 1
        self.read = min(self.read + 1, len(self.requests))
        return [SimpleNamespace(request_id=name, finished=False) for name in self.requests[: self.read]]

    def abort_request(self, names):
        self.requests = []

    def has_unfinished_requests(self):
        return bool(self.requests)


@pytest.fixture
def fake_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **options: options))


def test_decode_is_timed_once_every_prompt_is_read(fake_vllm):
    engine = Engine()
    found = vllm_throughput.decode(SimpleNamespace(llm_engine=engine), requests=3, context=5, steps=4)
    assert engine.steps == 3 + vllm_throughput._WARM_STEPS + 4
    assert found["tokens_per_s"] > 0 and found["prefill_s"] > 0 and not engine.has_unfinished_requests()


def test_where_prompts_do_not_attend_decode_does_and_no_prefill_is_told(fake_vllm, monkeypatch):
    seen, output = [], torch.full((2, 3), 7.0)

    class Attention:
        def forward(self, *args, output, **_):
            return output

    layer = SimpleNamespace(impl=Attention())
    engine = Engine()
    step = engine.step

    def attending():
        seen.append(float(layer.impl.forward(layer, *[None] * 5, output=output.clone(), output_scale=None).sum()))
        return step()

    engine.step = attending
    monkeypatch.setattr(vllm_throughput, "attention_layers", lambda llm: [layer])
    found = vllm_throughput.decode(SimpleNamespace(llm_engine=engine), requests=3, context=5, steps=4, attend=False)
    assert seen == [0.0] * 3 + [42.0] * (vllm_throughput._WARM_STEPS + 4)
    assert found["prompts_attend"] is False and found["prefill_s"] is None and found["tokens_per_s"] > 0


@pytest.mark.parametrize(("holds", "requests", "largest"), [(40, 40, True), (128, 128, True), (300, 128, False)])
def test_a_batch_is_the_largest_that_fits_where_the_cache_holds_no_more(holds, requests, largest, monkeypatch):
    room = 32768 + vllm_throughput._SLACK + vllm_throughput._WARM_STEPS + vllm_throughput.DECODE_STEPS
    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=holds, block_size=room),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
    )
    monkeypatch.setattr(vllm_throughput, "engine", lambda *_: SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)))
    monkeypatch.setattr(vllm_throughput, "attention_layers", lambda _: [SimpleNamespace(impl=object())])
    monkeypatch.setattr(vllm_throughput, "decode", lambda llm, asked, *_, **__: {"asked": asked})
    rows = []
    vllm_throughput.engine_rows("smollm2-135m", "vllm_bf16", ["maxx32768", "129x32768"], rows.append, float("inf"))
    assert (rows[0]["asked"], rows[0]["largest"]) == (requests, largest)
    assert rows[1]["status"] == "absent" and rows[1]["reason"] == f"{requests} requests fit"


def test_a_step_in_which_a_request_stands_still_is_no_measurement(fake_vllm):
    engine = Engine()
    step = engine.step
    engine.step = lambda: step()[:-1] if engine.steps >= 4 else step()
    with pytest.raises(RuntimeError, match="2 of 3 requests made a token"):
        vllm_throughput.decode(SimpleNamespace(llm_engine=engine), requests=3, context=5, steps=4)


def test_an_engine_that_runs_ahead_answers_with_nothing_once(fake_vllm):
    engine = Engine()
    step = engine.step
    engine.step = lambda: [] if engine.steps == 9 and not setattr(engine, "steps", 10) else step()
    assert vllm_throughput.decode(SimpleNamespace(llm_engine=engine), requests=3, context=5, steps=4)["step_ms"] > 0


def test_prompts_that_take_too_long_are_given_up_and_leave_nothing_behind(fake_vllm):
    engine = Engine()
    with pytest.raises(vllm_throughput.OutOfTime):
        vllm_throughput.decode(SimpleNamespace(llm_engine=engine), requests=3, context=5, deadline=0)
    assert not engine.has_unfinished_requests()


# ------------------------------------------------------------------------------------------- rows and what follows from them

SPEED = {"pagedkv_int8": 30.0, "vllm_bf16": 15.0, "vllm_fp8": 20.0, "vllm_int8": 5.0}


@pytest.fixture
def parts(monkeypatch):
    """Stands in for the processes: each part's rows, made up; returns what was run of which part, and for how many seconds."""
    ran, failing = [], set()

    class Process:
        def __init__(self, part, folder):
            self.part, self.folder = part, folder

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, points, seconds):
            part = self.part
            ran.append((part.name, seconds))
            for wanted in part.wanted(points):
                if part.model is None:
                    measured = {"p50_us": 2.0 if wanted["implementation"] == "pagedkv" else 12.0}
                elif (part.cache, wanted["point"]) in failing:
                    continue
                else:
                    prefill_s = None if wanted["point"].startswith("max") else 7.0
                    measured = {"tokens_per_s": SPEED[part.cache], "prefill_s": prefill_s}
                vllm_throughput.append(self.folder, {**wanted, "status": "measured", **measured})
            return "it broke"

    monkeypatch.setattr(vllm_throughput, "Process", Process)
    return SimpleNamespace(ran=ran, failing=failing, names=lambda: [name for name, _ in ran])


def value(rows, **fields):
    (row,) = (row for row in rows if row["kind"] == "derived" and all(row.get(k) == v for k, v in fields.items()))
    return row["value"]


def test_ratios_are_of_what_was_measured(parts, tmp_path):
    rows = vllm_throughput.rows(tmp_path, ("32x8192", "maxx32768"))
    assert value(rows, quantity="kernel_vs_vllm_int8", shape="256x4096") == 6
    assert value(rows, quantity="decode_vs_vllm_int8", model="llama-3-8b", point="32x8192") == 6
    assert value(rows, quantity="decode_vs_best_of_vllm", model="llama-3-8b", point="maxx32768") == 1.5
    assert value(rows, quantity="prefill_time_vs_bf16", model="llama-3-8b", point="32x8192") == 1
    assert not [row for row in rows if row.get("quantity") == "prefill_time_vs_bf16" and row["point"] == "maxx32768"]


def test_what_failed_is_a_row_with_its_reason_and_is_measured_by_the_next_run(parts, tmp_path):
    parts.failing.add(("vllm_fp8", "maxx32768"))
    rows = vllm_throughput.rows(tmp_path, ("32x8192", "maxx32768"))
    (absent,) = (row for row in rows if row.get("status") == "absent" and row["model"] == "llama-3-8b")
    assert absent["cache"] == "vllm_fp8" and absent["reason"] == "it broke"
    assert not [row for row in rows if row.get("quantity") == "decode_vs_best_of_vllm" and row["point"] == "maxx32768"]
    parts.failing.clear()
    parts.ran.clear()
    rows = vllm_throughput.rows(tmp_path, ("32x8192", "maxx32768"))
    assert parts.names() == ["llama-3-8b.vllm_fp8", "smollm2-135m.vllm_fp8"]
    assert value(rows, quantity="decode_vs_best_of_vllm", model="llama-3-8b", point="maxx32768") == 1.5
    assert not [row for row in rows if row.get("status") == "absent"]


def test_what_is_missing_of_the_first_point_is_measured_first(parts, tmp_path):
    parts.failing |= {("pagedkv_int8", "32x4096"), ("vllm_bf16", "maxx32768")}
    vllm_throughput.rows(tmp_path, ("maxx32768", "32x4096"))
    assert parts.names()[:2] == ["kernel", "llama-3-8b.pagedkv_int8"]
    parts.ran.clear()
    vllm_throughput.rows(tmp_path, ("maxx32768", "32x4096"))
    assert parts.names()[:2] == ["llama-3-8b.vllm_bf16", "llama-3-8b.pagedkv_int8"]


def test_where_time_is_short_each_engine_leaves_enough_for_those_to_come_and_the_last_are_left_out(parts, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(vllm_throughput.time, "monotonic", lambda: now[0])
    append, engine_s = vllm_throughput.append, vllm_throughput._ENGINE_S

    def taking_time(folder, row):
        now[0] += engine_s if row["kind"] == "engine" and row["status"] == "measured" else 0
        append(folder, row)

    monkeypatch.setattr(vllm_throughput, "append", taking_time)
    rows = vllm_throughput.rows(tmp_path, ("32x8192",), seconds=3 * engine_s)
    assert parts.names() == ["kernel", "llama-3-8b.pagedkv_int8", "llama-3-8b.vllm_fp8", "llama-3-8b.vllm_bf16"]
    assert [seconds for _, seconds in parts.ran] == [engine_s] * 4
    left_out = [row for row in rows if row["kind"] == "engine" and row["status"] == "absent"]
    assert [row["cache"] for row in left_out if row["model"] == "llama-3-8b"] == ["vllm_int8"]
    assert {row["reason"] for row in left_out} == {"no time was left"}


def test_rows_are_of_their_sources_but_not_of_what_a_notebook_tells(monkeypatch):
    from pagedkv.evidence import hardware

    monkeypatch.setattr(hardware, "describe", lambda device: {"name": "a card"})
    sources = {"notebooks/vllm.ipynb": "a", "kernels/ops.h": "b"}
    state = vllm_throughput.state(sources)
    assert state == vllm_throughput.state({**sources, "notebooks/vllm.ipynb": "c"})
    assert state != vllm_throughput.state({**sources, "kernels/ops.h": "c"})


def started(monkeypatch, tmp_path, program: str) -> vllm_throughput.Process:
    monkeypatch.setattr(vllm_throughput.child, "command", lambda *_: [sys.executable, "-c", program])
    return vllm_throughput.Process(vllm_throughput.Part("llama-3-8b", "vllm_bf16"), tmp_path)


def test_a_part_begins_when_told_and_its_log_tells_why_it_failed(tmp_path, monkeypatch):
    program = "import json, sys; raise ValueError('no GPU for ' + json.loads(sys.stdin.readline())['points'][0])"
    with started(monkeypatch, tmp_path, program) as process:
        assert process._process.poll() is None
        assert process.run(["32x8192"], float("inf")) == "ValueError: no GPU for 32x8192"


def test_a_part_that_died_before_it_was_told_anything_says_why(tmp_path, monkeypatch):
    with started(monkeypatch, tmp_path, "raise ImportError('no vllm')") as process:
        process._process.wait()
        assert process.run(["32x8192"], 60.0) == "ImportError: no vllm"


def test_a_part_that_hangs_or_is_not_needed_is_ended(tmp_path, monkeypatch):
    with started(monkeypatch, tmp_path, "import time; time.sleep(600)") as process:
        assert process.run(["32x8192"], -14.5) == "no time was left"
    with started(monkeypatch, tmp_path, "input()") as process:
        pass
    assert process._process.returncode == -9
