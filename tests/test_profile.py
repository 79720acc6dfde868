"""Nsight Compute's table as rows; and where there is none, one line that says why."""

import subprocess

import pytest
import torch

from pagedkv.bench import profile

CUDA = torch.device("cuda", 0)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC",
    "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.per_cycle_active", "launch__registers_per_thread",
    STALL.format("long_scoreboard"), STALL.format("wait"), STALL.format("selected"),
)  # fmt: skip
UNITS = ("", "", "", "", "", "", "", "", "", "", "", "byte", "byte", "ns", "%", "inst/cycle", "register/thread", "inst", "inst", "inst")
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)"
DECODE = "void pagedkv::attention::decode_mma<pagedkv::attention::DecodeConfig<__half, (pagedkv::attention::CacheKind)0, 128>>(pagedkv::P)"


def line(*cells) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def launch(number: int, kernel: str, *counters) -> str:
    return line(number, 7, "python3", "127.0.0.1", kernel, 1, 7, "(128, 1, 1)", "(8, 256, 1)", 0, "9.0", *counters)


TABLE = "\n".join(
    [
        "==PROF== Connected to process 7 (python3)",
        '==PROF== Profiling "decode_mma": 0%....50%....100% - 9 passes',
        line(*COLUMNS),
        line(*UNITS),
        launch(0, FILL, 0, 32, 1000, 0.1, 0.01, 16, 1, 1, 1),
        launch(1, DECODE, "2,151,677,952", 1048576, "500,000", 88.5, 0.3, 128, 12.5, 1.5, 1),
        launch(2, "void pagedkv::attention::finish<__half>(pagedkv::AttentionParams, int)", 1000, 0, "2,000", 2.5, 0.1, 40, 20, 3, 1),
        launch(3, FILL, 0, 32, 1000, 0.1, 0.01, 16, 1, 1, 1),
        launch(4, DECODE, "n/a", 0, "9,000", 20, 0.2, 128, "", 2, 1),
        "==PROF== Disconnected from process 7",
    ]
)


def test_each_kernel_is_a_row_of_the_case_whose_marker_came_before_it():
    first, second, third = profile.parse(TABLE, ["decode 256x4096", "decode 8x512"])
    assert [r["case"] for r in (first, second, third)] == ["decode 256x4096"] * 2 + ["decode 8x512"]
    assert first["kernel"].startswith("decode_mma<DecodeConfig<__half") and second["kernel"] == "finish<__half>"
    assert (first["us"], first["dram_read_bytes"], first["registers"], first["grid"]) == (500.0, 2151677952, 128, "(8, 256, 1)")
    assert first["dram_gb_per_s"] == pytest.approx((2151677952 + 1048576) / 500 / 1e3)
    assert first["stalls"] == {"long_scoreboard": 12.5, "wait": 1.5}, "the largest first, and an issue is no stall"
    assert first["occupancy_percent"] is None, "a metric that this ncu does not have"
    assert third["dram_read_bytes"] is None and third["dram_gb_per_s"] is None and third["stalls"] == {"wait": 2.0}


def test_the_bytes_of_a_call_are_those_of_all_its_kernels():
    rows = list(profile.bytes_rows(profile.parse(TABLE, ["decode 256x4096", "decode 8x512"])))
    assert rows[0]["us"] == 502.0 and rows[0]["dram_read_bytes"] == 2151678952
    assert rows[0]["bytes_ratio"] == pytest.approx(2151678952 / (2 * 256 * 4096 * 8 * 128 + 2 * 256 * 256 * 8 * 4))
    assert rows[1]["bytes_ratio"] is None


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
            "ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
        ),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", "Failed to initialize the profiler: LibraryNotLoaded"),
        ("no kernels\nwere profiled", "ncu printed no table: no kernels were profiled"),
    ],
)
def test_counters_that_may_not_be_read_are_one_row_with_the_reason(monkeypatch, said, reason):
    monkeypatch.setattr(profile, "ncu", lambda: "/usr/bin/ncu")
    monkeypatch.setattr(profile.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, said, ""))
    (row,) = profile.profile_rows(CUDA)
    assert (row["status"], row["reason"]) == ("absent", reason)


def test_the_table_holds_every_case(monkeypatch):
    """ncu is made up: a fill and a decode kernel for each case that the program would run."""

    def ncu(command, env, **how):
        with open(command[command.index("--log-file") + 1], "w") as log:
            lines = [line(*COLUMNS), line(*UNITS)]
            for _ in profile.CASES:
                lines += [launch(0, FILL, 0, 32, 1000, 0.1, 0.01, 16, 1, 1, 1), launch(1, DECODE, 1, 1, 9000, 20, 0.2, 128, 1, 2, 1)]
            log.write("\n".join(lines))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(profile, "ncu", lambda: "/usr/bin/ncu")
    monkeypatch.setattr(profile.subprocess, "run", ncu)
    assert [row["case"] for row in profile.profile_rows(CUDA)] == list(profile.CASES)


def test_a_machine_without_ncu_says_so(monkeypatch):
    monkeypatch.setattr(profile, "ncu", lambda: None)
    (row,) = profile.profile_rows(CUDA)
    assert row["status"] == "absent" and "Nsight Compute" in row["reason"]


def test_every_case_can_be_prepared_and_called(monkeypatch):
    monkeypatch.setattr(profile, "_POOL", 5000)
    cpu = torch.device("cpu")
    for name, case in profile.CASES.items():
        if not name.startswith("decode") or name == "decode 8x512":  # others: gigabytes
            case.prepare(cpu)()
