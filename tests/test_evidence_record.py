"""Records are written whole or not at all, and read only if nobody changed them."""

from __future__ import annotations

import errno
import json
import math
import os

import evidence_project as project
import numpy as np
import pytest
import torch

from pagedkv.evidence import record as records
from pagedkv.evidence.record import RecordError


@pytest.fixture
def root(tmp_path):
    return project.make(tmp_path / "checkout")


def test_what_is_written_is_what_is_read(root):
    record = project.measured_record(root)
    records.write(record, root / "build/new/attention.json", root)
    read = records.read(root / "build/new/attention.json", root)
    digest = read["provenance"].pop("digest")
    assert read == record
    assert len(digest) == 64


def test_each_row_stands_on_a_line_of_its_own(root):
    lines = (root / project.RECORD).read_text().splitlines()
    assert sum(line.startswith('  {"shape"') for line in lines) == 4


def test_the_digest_does_not_depend_on_spelling_but_a_respelled_record_is_refused(root):
    path = root / project.RECORD
    record = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(record.items())), indent=7))
    assert records.digest(json.loads(path.read_text())) == records.digest(record)
    with pytest.raises(records.RecordError, match="text"):
        records.read(path, root)


def test_a_digit_too_far_back_to_make_another_float_is_found(root):
    path = root / project.RECORD
    record = json.loads(path.read_text())
    record["rows"][0]["p50_us"] = 0.1
    records.write(record, path, root)
    path.write_text(path.read_text().replace('"p50_us": 0.1', '"p50_us": 0.10000000000000001'))
    with pytest.raises(records.RecordError, match="text"):
        records.read(path, root)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["rows"][0].update(p50_us=125.24),
        lambda r: r["rows"].pop(),
        lambda r: r["rows"].reverse(),
        lambda r: r["hardware"].update(name="Best"),
        lambda r: r["software"].update(torch="2.14.0"),
        lambda r: r["provenance"].update(seconds=1),
        lambda r: r["provenance"]["parameters"].update(device="cuda"),
    ],
)
def test_any_value_changed_by_hand_is_found(root, change):
    project.edit_record(root, change, honest=False)
    with pytest.raises(RecordError, match="digest does not match"):
        records.read(root / project.RECORD, root)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(rows=[]),
        lambda r: r.update(extra=1),
        lambda r: r.update(kind="guessed"),
        lambda r: r.update(experiment="Attention Test"),
        lambda r: r["hardware"].pop("slug"),
        lambda r: r["hardware"].update(slug="gpu-test"),
        lambda r: r["software"].pop("backend"),
        lambda r: r["provenance"].pop("seconds"),
        lambda r: r["provenance"].update(sources={}),
        lambda r: r["provenance"].update(sources={"/etc/passwd": "0" * 64}),
        lambda r: r["provenance"].update(sources={"../secret": "0" * 64}),
        lambda r: r["provenance"].update(sources={"a": "abc"}),
        lambda r: r["provenance"].update(finished_at="yesterday"),
        lambda r: r["provenance"].update(published={"source": "x", "note": "y"}),
    ],
)
def test_the_schema_refuses(root, change):
    record = project.measured_record(root)
    change(record)
    with pytest.raises(RecordError, match="not a valid record"):
        records.write(record, root / "new.json", root)
    assert not (root / "new.json").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), [1.0, math.nan]])
def test_what_is_no_number_is_refused_by_name(root, value):
    record = project.measured_record(root)
    record["rows"][1]["p50_us"] = value
    with pytest.raises(ValueError, match=r"rows\[1\].p50_us.*write None"):
        records.write(record, root / "new.json", root)
    assert not (root / "new.json").exists()


def test_numpy_and_torch_values_become_plain():
    values = {"a": np.float32(0.5), "b": torch.tensor(3), "c": (np.int64(1), True), "d": np.arange(2), "e": None}
    assert records.plain(values) == {"a": 0.5, "b": 3, "c": [1, True], "d": [0, 1], "e": None}
    with pytest.raises(TypeError, match=r"record\.a: expected a JSON value, got set"):
        records.plain({"a": {1}})


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "no space left on the device"), (errno.EIO, os.strerror(errno.EIO))])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_record_and_nothing_else(root, monkeypatch, code, words, step):
    path = root / project.RECORD
    before, beside = path.read_text(), sorted(os.listdir(path.parent))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(RecordError) as error:
        records.write(project.measured_record(root), path, root)
    assert str(error.value) == f"{path}: not written: {words}"
    assert path.read_text() == before
    assert sorted(os.listdir(path.parent)) == beside


def test_a_full_disk_is_one_line(root):
    """A real one: /dev/full refuses every write."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    path = root / "new.json"

    class Full:
        def __call__(self, *args, **kwargs):
            return os.open("/dev/full", os.O_WRONLY), str(path) + ".tmp"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records.tempfile, "mkstemp", Full())
        with pytest.raises(RecordError, match="no space left on the device"):
            records.write_text(path, "text")
    assert not path.exists()


def test_a_folder_that_cannot_be_made_is_one_line(root):
    (root / "file").write_text("")
    with pytest.raises(RecordError, match="not written: "):
        records.write(project.measured_record(root), root / "file" / "attention.json", root)


def test_a_record_that_is_not_there_is_one_line(root):
    with pytest.raises(RecordError, match="there is no such record"):
        records.read(root / "results/cpu-test/none.json", root)


def test_sources_must_exist_and_lie_in_the_checkout(root):
    with pytest.raises(RecordError, match="no such file"):
        records.hashes(["kernels/none.cu"], root)
    with pytest.raises(RecordError, match="only names files inside"):
        records.hashes(["../outside"], root)


def test_published_rows_say_that_they_are_published(root):
    assert records.published("attention", root) == [
        {"origin": "published", "hardware_name": "NVIDIA T1000", "shape": "8x512", "p50_us": 1760.0},
    ]
    with pytest.raises(RecordError, match="there is no such record"):
        records.published("none", root)
