"""`sirtaki trace` on recordings made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fakes.played_jobs import record, without, written
from fakes.replays import over_a_link

from sirtaki.analysis.recording_files import TRACE_FILE
from sirtaki.cli.__main__ import main


def test_the_trace_for_perfetto_is_written_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(written(tmp_path, record(over_a_link())))]) == 0
    assert str(tmp_path / TRACE_FILE) in capsys.readouterr().out
    assert (tmp_path / TRACE_FILE).exists()


def test_chakra_traces_are_counted_from_0_on_and_it_is_said_of_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("google.protobuf", minversion="5.28")
    folder = written(tmp_path / "recorded", without(record(over_a_link(ranks=3)), 1))
    assert main(["trace", str(folder), "--chakra", str(tmp_path / "out" / "job")]) == 0
    told = capsys.readouterr()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["job.0.et", "job.1.et"]
    assert "2 iterations of 2 ranks" in told.out
    assert "counted from 0 on, these are ranks 0 and 2" in told.out
    assert "rank 1 of 3 is missing" in told.err
    assert not (folder / TRACE_FILE).exists()


def test_what_cannot_be_done_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["trace", str(tmp_path / "nothing")]) == 1
    assert "is no folder" in capsys.readouterr().err
    folder = written(tmp_path / "recorded", record(over_a_link()))
    (tmp_path / "file").write_text("")
    assert main(["trace", str(folder), "--chakra", str(tmp_path / "file" / "job")]) == 1
    assert capsys.readouterr().err.startswith("sirtaki trace: ")
    for name in [name for name in sys.modules if name.startswith("sirtaki.analysis.chakra")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert main(["trace", str(folder), "--chakra", str(tmp_path / "job")]) == 1
    assert "pip install 'sirtaki[chakra]'" in capsys.readouterr().err
