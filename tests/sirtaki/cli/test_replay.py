"""`sirtaki replay` on recordings made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.played_jobs import plan_of, record, written
from fakes.replays import SIZES, on_one_host, over_a_link

from sirtaki.analysis.recording_files import rank_path
from sirtaki.cli.__main__ import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "recording", record(over_a_link(ranks=3)))


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = main(["replay", str(folder), *options])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_recorded_and_replayed_times_the_path_and_remedies_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = asked(folder, capsys)
    assert (status, err) == (0, "")
    assert "3 ranks on 3 hosts, 2 iterations; gloo flat, 1 B units, 2 streams" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line and line.split()[0] in ("iteration", "forward")}
    assert "0.0 %" in lines["iteration"]
    assert "of the step is the link between hosts" in out
    assert "the links were twice as fast" in out


def test_what_is_asked_is_answered_all_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(folder, capsys, "--ranks", "6", "--streams", "1", "--unit-mib", "1", "--no-straggler")
    assert "the plan were units of 1 MiB, 1 streams, no rank were slower than most, there were 6 ranks: " in out
    assert "% more" in out or "% less" in out
    _, slower, _ = asked(folder, capsys, "--link-gbit", "0.0001", "--json")
    (answer,) = json.loads(slower)["what_if"]
    assert answer["gain"] < -1


def test_a_plan_can_be_asked_for(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of(SIZES, (4,)).to_json()))
    status, out, _ = asked(folder, capsys, "--plan", str(path))
    assert (status, "the plan were" in out) == (0, True)
    path.write_text("{}")
    status, _, err = asked(folder, capsys, "--plan", str(path))
    assert (status, "is no plan" in err) == (1, True)


def test_what_is_missing_is_said_and_the_rest_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank_path(folder, 2).unlink()
    status, out, err = asked(folder, capsys)
    assert status == 0
    assert "rank 2 of 3 is missing" in err
    assert "2 ranks on 2 hosts" in out


def test_a_job_without_its_first_rank_can_be_asked_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank_path(folder, 0).unlink()
    status, out, _ = asked(folder, capsys, "--streams", "1", "--unit-mib", "1")
    assert (status, "What if" in out) == (0, True)


def test_a_recording_without_units_shows_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = record(on_one_host())
    ranks = {
        number: replace(rank, iterations=tuple(replace(one, units=()) for one in rank.iterations))
        for number, rank in recording.ranks.items()
    }
    folder = written(tmp_path / "bare", replace(recording, ranks=ranks))
    status, out, err = asked(folder, capsys)
    assert status == 0
    assert "no gradients were exchanged" in err
    assert "of the step is the backward pass" in out
    assert "bytes ÷ bandwidth" in out
    status, _, err = asked(folder, capsys, "--streams", "2")
    assert (status, "there is no plan to change" in err) == (1, True)


def test_nonsense_gets_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(tmp_path, capsys)[0] == 1
    status, _, err = asked(folder, capsys, "--transport", "mpi")
    assert (status, err.count("\n")) == (1, 1)
    assert "nothing is known of mpi flat" in err
    with pytest.raises(SystemExit):
        asked(folder, capsys, "--ranks", "none")
    one = written(tmp_path / "one", record(on_one_host()))
    status, _, err = asked(one, capsys, "--link-gbit", "1")
    assert (status, "all ranks are on one host" in err) == (1, True)
