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
    assert engine.steps == 3 + 4
    assert found["tokens_per_s"] > 0 and found["prefill_s"] > 0 and not engine.has_unfinished_requests()


def test_a_step_in_which_a_request_stands_still_is_no_measurement(fake_vllm):
    engine = Engine()
    step, engine.step = engine.step, lambda: step()[:-1] if engine.steps >= 4 else step()
    with pytest.raises(RuntimeError, match="2 of 3 requests made a token"):
        vllm_throughput.decode(SimpleNamespace(llm_engine=engine), requests=3, context=5, steps=4)
