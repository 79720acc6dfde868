"""What the vLLM experiment computes from an engine, on engines that are made up: no vLLM is needed."""

import sys
from types import SimpleNamespace

import pytest

from pagedkv.bench import vllm_engine, vllm_throughput
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
    with pytest.raises(vllm_engine.Absent, match="make vllm"):
        vllm_engine.elsewhere("cpu", tmp_path / "engine", [])


def test_the_environment_of_make_vllm_goes_first(monkeypatch, tmp_path):
    python = tmp_path / "build" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(vllm_engine, "find_root", lambda: tmp_path)
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)
    assert vllm_engine.interpreter("cpu") == python
    with pytest.raises(vllm_engine.Absent, match="pip install vllm"):
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
    """Stands in for the processes: each part's rows, made up; returns the parts that were run."""
    ran = []

    def run(part, folder, points, seconds):
        ran.append(part.name)
        for wanted in part.wanted(points):
            if part.model is None:
                vllm_throughput.append(
                    folder, {**wanted, "status": "measured", "p50_us": 2.0 if wanted["implementation"] == "pagedkv" else 12.0}
                )
            elif (part.cache, wanted["point"]) not in failing:
                speed = SPEED[part.cache]
                vllm_throughput.append(folder, {**wanted, "status": "measured", "tokens_per_s": speed, "prefill_s": 7.0})
        return "it broke"

    failing: set = set()
    monkeypatch.setattr(vllm_throughput, "_run", run)
    monkeypatch.setattr(vllm_throughput, "_state", lambda: "state")
    return SimpleNamespace(ran=ran, failing=failing)


def value(rows, **fields):
    (row,) = (row for row in rows if row["kind"] == "derived" and all(row.get(k) == v for k, v in fields.items()))
    return row["value"]


def test_ratios_are_of_what_was_measured(parts, tmp_path):
    rows = vllm_throughput.rows(tmp_path, ("32x8192", "maxx32768"))
    assert value(rows, quantity="kernel_vs_vllm_int8", shape="256x4096") == 6
    assert value(rows, quantity="decode_vs_vllm_int8", model="llama-3-8b", point="32x8192") == 6
    assert value(rows, quantity="decode_vs_best_of_vllm", model="llama-3-8b", point="maxx32768") == 1.5
    assert value(rows, quantity="prefill_time_vs_bf16", model="llama-3-8b", point="32x8192") == 1


def test_what_failed_is_a_row_with_its_reason_and_is_measured_by_the_next_run(parts, tmp_path):
    parts.failing.add(("vllm_fp8", "maxx32768"))
    rows = vllm_throughput.rows(tmp_path, ("32x8192", "maxx32768"))
    (absent,) = (row for row in rows if row.get("status") == "absent" and row["model"] == "llama-3-8b")
    assert absent["cache"] == "vllm_fp8" and absent["reason"] == "it broke"
    assert not [row for row in rows if row.get("quantity") == "decode_vs_best_of_vllm" and row["point"] == "maxx32768"]
    parts.failing.clear()
    parts.ran.clear()
    rows = vllm_throughput.rows(tmp_path, ("32x8192", "maxx32768"))
    assert parts.ran == ["llama-3-8b.vllm_fp8", "smollm2-135m.vllm_fp8"]
    assert value(rows, quantity="decode_vs_best_of_vllm", model="llama-3-8b", point="maxx32768") == 1.5
    assert not [row for row in rows if row.get("status") == "absent"]


def test_where_time_is_short_each_engine_leaves_enough_for_those_to_come(parts, tmp_path):
    vllm_throughput.rows(tmp_path, ("32x8192",), seconds=3 * vllm_throughput._ENGINE_S)
    assert "llama-3-8b.pagedkv_int8" not in parts.ran and "llama-3-8b.vllm_int8" in parts.ran


def test_a_part_runs_in_a_process_whose_log_tells_why_it_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_throughput.child, "command", lambda *_: [sys.executable, "-c", "raise ValueError('no GPU here')"])
    part = vllm_throughput.Part("llama-3-8b", "vllm_bf16")
    assert vllm_throughput._run(part, tmp_path, ["32x8192"], float("inf")) == "ValueError: no GPU here"
