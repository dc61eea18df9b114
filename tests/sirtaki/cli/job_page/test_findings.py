from dataclasses import replace
from pathlib import Path

import pytest
from fakes.compiled_jobs import compiled_job
from fakes.played_jobs import record, written
from fakes.recordings import recording as made
from fakes.replays import on_one_host, over_a_link

from sirtaki.analysis import page as module
from sirtaki.analysis.page import findings
from sirtaki.analysis.recording import Detail
from sirtaki.analysis.recording_files import rank_path
from sirtaki.analysis.what_if import Answer
from sirtaki.errors import RecordingError, ReplayError
from sirtaki.measures import LinkModel


def test_a_whole_recording_is_replayed_and_asked(tmp_path: Path) -> None:
    found = findings(written(tmp_path, record(over_a_link(ranks=3))))
    assert (found.problems, found.has_operators, found.is_far) == ((), True, False)
    assert "2 iterations of 3 ranks on 3 hosts, with operators" in found.lines
    assert found.played is not None
    assert abs(found.error) < 1e-6
    assert sum(part.share for part in found.played.parts) == pytest.approx(1.0)
    gains = [one.gain for one in found.played.answers]
    assert gains == sorted(gains, reverse=True)
    words = " ".join(one.words for one in found.played.answers)
    for remedy in ("no rank were slower", "twice as fast", "half as many bytes", "units were cut"):
        assert remedy in words


def test_a_compiled_model_in_parts_is_among_what_would_help(tmp_path: Path) -> None:
    link = LinkModel(alpha_s=1e-3, throughput=(2e7, 4e7), host_s=0.0)
    found = findings(written(tmp_path, record(compiled_job(link))))
    assert found.played is not None
    (one,) = (one for one in found.played.answers if "hvd.early_gradients(part_bytes=" in one.words)
    assert one.gain > 0.1
    assert found.played.is_sure(one)


def test_a_rank_that_was_killed_is_said_and_the_others_are_shown(tmp_path: Path) -> None:
    folder = written(tmp_path, record(over_a_link(ranks=3)))
    rank_path(folder, 2).write_bytes(rank_path(folder, 2).read_bytes()[:100])
    found = findings(folder)
    assert found.histories.ranks == (0, 1)
    assert any("cannot be read" in problem for problem in found.problems)
    assert "rank 2 of 3 is missing" in found.problems


def test_ranks_without_iterations_in_common_are_left_out(tmp_path: Path) -> None:
    recording = made(3)
    short = replace(recording.ranks[1], iterations=(), complete=False)
    found = findings(written(tmp_path, replace(recording, ranks={**recording.ranks, 1: short})))
    assert found.histories.ranks == (0, 2)
    assert "rank 1 has no iteration that most others have recorded, and is left out" in found.problems


def test_a_recording_without_iterations_is_nothing_to_show(tmp_path: Path) -> None:
    recording = made(2)
    ranks = {number: replace(rank, iterations=(), complete=False) for number, rank in recording.ranks.items()}
    with pytest.raises(RecordingError, match="no iteration was recorded"):
        findings(written(tmp_path, replace(recording, ranks=ranks)))


def test_ranks_of_another_model_are_left_out(tmp_path: Path) -> None:
    recording = made(3)
    other = replace(recording.ranks[2], model="other")
    found = findings(written(tmp_path, replace(recording, ranks={**recording.ranks, 2: other})))
    assert found.histories.ranks == (0, 1)
    assert any("rank 2 trained another model" in problem for problem in found.problems)


def test_what_cannot_be_replayed_is_shown_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ReplayError("it goes round in a circle")

    monkeypatch.setattr(module, "job_model", refuse)
    found = findings(written(tmp_path, record(on_one_host())))
    assert found.played is None
    assert found.problems == ("what is here cannot be replayed: it goes round in a circle",)


def test_a_replay_that_is_far_from_the_recording_is_asked_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = module.replayed

    def slower(replay):  # type: ignore[no-untyped-def]
        times = replayed(replay)
        return replace(times, iteration_s=1.2 * times.iteration_s)

    monkeypatch.setattr(module, "replayed", slower)
    found = findings(written(tmp_path, record(on_one_host())))
    assert found.is_far
    assert found.error == pytest.approx(0.2, abs=1e-3)
    assert found.played is not None
    assert found.played.answers == ()


def test_what_is_within_the_error_of_prices_is_not_the_best(tmp_path: Path) -> None:
    found = findings(written(tmp_path, record(over_a_link(ranks=3))))
    assert found.played is not None
    times = found.times
    units = Answer(words="units", times=times, gain=0.3, is_priced=True)
    link = Answer(words="link", times=times, gain=0.2)
    played = replace(found.played, answers=(units, link), price_error=-0.1)
    assert played.best is units
    assert replace(played, price_error=-0.4).best is link
    assert replace(played, answers=(replace(link, gain=0.005),)).best is None


def test_units_alone_are_no_operators(tmp_path: Path) -> None:
    assert not findings(written(tmp_path, record(on_one_host(), detail=Detail.UNITS))).has_operators
