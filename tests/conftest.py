"""What computes the ops, as a fixture: each test that asks for `device` runs on every backend this machine has."""

import os

# Workers side by side share the cores; with a thread for each core in every one of them, small tensors spend their time
# waiting. Before torch is imported, and for the processes that tests start.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if _WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _WORKERS)))

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from pagedkv.ops import build, registry  # noqa: E402

# The same examples on every run, so that a red build means a change; `HYPOTHESIS_PROFILE=explore` looks for new ones.
_COMMON = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("repeatable", max_examples=40, derandomize=True, database=None, **_COMMON)
hypothesis.settings.register_profile("explore", max_examples=2000, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

BACKENDS = ["cpu-c++", "cpu-pytorch", *(["cuda", "cuda-pytorch"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """The compiled kernels of each device, and the plain PyTorch that stands in where no compiler is found."""
    device_type, _, kind = request.param.partition("-")
    if kind == "pytorch":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors this small only make threads wait for each other
        with registry.plain_pytorch():
            yield request.param
        torch.set_num_threads(threads)
        return
    missing = build.missing_tool(device_type)
    if missing or os.environ.get("PAGEDKV_BACKEND") == "pytorch":
        pytest.skip(f"no compiled {device_type} kernels: {missing or 'PAGEDKV_BACKEND=pytorch'}")
    yield request.param


@pytest.fixture
def device(backend):
    return torch.device(backend.partition("-")[0])


@pytest.fixture
def plain_pytorch():
    """For tests of what all backends share (validation, registration): no compiler needed."""
    with registry.plain_pytorch():
        yield


@pytest.fixture
def quick_timer(monkeypatch):
    """Times of one call each: these tests ask what is measured, not how long it takes."""

    from pagedkv.bench import append, attention, bandwidth, eviction

    def once(fn=None, device=None, mode="cpu", *, rotate=None, **_):
        for call in rotate or [fn]:
            call()
        return {"p10_us": 1.0, "p50_us": 2.0, "p90_us": 3.0, "repeats": 1, "calls_per_repeat": 1, "mode": mode}

    for module in (append, attention, bandwidth, eviction):
        monkeypatch.setattr(module, "measure", once)
