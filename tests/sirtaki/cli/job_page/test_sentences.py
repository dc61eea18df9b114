from pathlib import Path

from fakes.played_jobs import record, written
from fakes.replays import on_one_host, over_a_link

from sirtaki.analysis.global_graph import StepTimes
from sirtaki.analysis.page import findings, gain, heading, kind_words, ms, percent, problems, sentences, signed_ms
from sirtaki.analysis.recording import Detail
from sirtaki.analysis.recording_files import rank_path
from sirtaki.analysis.timeline_plot import Kind
from sirtaki.analysis.what_if import Answer


def test_the_most_important_comes_in_a_few_sentences(tmp_path: Path) -> None:
    found = findings(written(tmp_path / "job", record(over_a_link(ranks=3))))
    assert heading(found) == (
        "job: 2 iterations of 3 ranks on 3 hosts, with operators; gloo flat, 1 B units, 2 streams."
    )
    length, exposed, path, remedy = sentences(found)
    assert length == f"A step takes {ms(found.times.iteration_s)}."
    assert exposed.endswith("is communication that no computation hides (mean of ranks).")
    assert path == "The largest part of the critical path: " + found.played.parts[0].describe() + "."
    assert remedy.startswith(f"What would help most: if {found.played.answers[0].words}, a step would take ")
    assert list(problems(found)) == []


def test_problems_are_sentences(tmp_path: Path) -> None:
    folder = written(tmp_path / "job", record(over_a_link(ranks=3)))
    rank_path(folder, 1).unlink()
    assert list(problems(findings(folder))) == ["Rank 1 of 3 is missing."]


def test_what_was_not_recorded_has_no_name_of_its_own(tmp_path: Path) -> None:
    found = findings(written(tmp_path, record(on_one_host(), detail=Detail.UNITS)))
    assert "told apart only where operators are recorded" in kind_words(Kind.OTHER, found)
    assert kind_words(Kind.UPDATE, found) == "update"


def test_numbers_are_short() -> None:
    assert (ms(0.19823), signed_ms(0.0012345), signed_ms(-1e-3)) == ("198.2 ms", "+1.23 ms", "-1 ms")
    assert (percent(0.5249), percent(0.0349)) == ("52 %", "3.5 %")
    times = StepTimes(iteration_s=1.0, phases_s={}, spread_s=0.0, iterations=1)
    told = [gain(Answer(words="", times=times, gain=share)) for share in (0.2, -0.2, 0.009, -0.009)]
    assert told == ["20 % less", "20 % longer", "as long", "as long"]
