"""The C++ kernels as compiled for lesser machines than this one: the core of the op tests, once more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.ops import build

CORE = (
    "every_cache or any_block_size or any_head_dim or together or spoils"
    " or matches_the_reference or half_a_step or one_at_a_time or exact_whatever or fused"
)
TESTS = Path(__file__).parent


def cpu_has(*features: str) -> bool:
    return all(feature in build._cpu_features().split() for feature in features)


def avx2_apart() -> bool:
    """Whether this machine's own kernels (`kernels/cpu/simd.h`) go beyond AVX2: where they are AVX2, every other test runs them."""
    return cpu_has("avx2", "fma", "f16c", "avx512_vnni", "avx512bw", "avx512vl")


@pytest.mark.skipif(build.missing_tool("cpu") is not None, reason="no compiler here")
@pytest.mark.parametrize(
    "isa",
    ["portable", pytest.param("avx2", marks=pytest.mark.skipif(not avx2_apart(), reason="the other tests run AVX2, or it is not here"))],
)
def test_core_of_the_ops(isa):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"cpu-c++ and ({CORE})"]
    files = [TESTS / f"test_{name}.py" for name in ("attention", "quantization", "cache", "eviction")]
    environment = {**os.environ, "PAGEDKV_CPU_ISA": isa, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

    backend = [sys.executable, "-c", "import pagedkv; print(pagedkv.backend())"]
    named = subprocess.run(backend, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert named == f"c++ ({isa})", "the kernels under test are not those asked for"
