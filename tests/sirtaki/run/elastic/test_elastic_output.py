"""Lines of several agents, with the rank that each worker has just then, on the console and in files."""

import io
from pathlib import Path

import pytest

from sirtaki.run.elastic.driver import ElasticOutput


def output(labels: dict[int, str], folder: Path | None = None, *, prefix: bool = True) -> ElasticOutput:
    return ElasticOutput(
        prefix=prefix, timestamps=False, folder=folder, label=lambda worker: labels[worker], place=lambda _: "a.0"
    )


def test_a_worker_is_called_by_the_rank_that_it_has_now(capfd: pytest.CaptureFixture[str]) -> None:
    labels = {3: "a:0"}
    shown = output(labels)
    shown.pump("stdout", io.BytesIO(b"[3] one\n"))
    labels[3] = "5"
    shown.pump("stdout", io.BytesIO(b"[3] two\n"))
    shown.finish()
    assert capfd.readouterr().out == "[a:0] one\n[5] two\n"


def test_what_no_rank_has_written_is_shown_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    shown = output({})
    shown.pump("stderr", io.BytesIO(b"ssh: connect to host a: refused\n"))
    shown.say("a line")
    shown.finish()
    assert capfd.readouterr().err == "ssh: connect to host a: refused\nsirtakirun: a line\n"


def test_a_place_has_one_file_for_all_that_have_been_there_in_this_job(tmp_path: Path) -> None:
    (tmp_path / "a.0").mkdir()
    (tmp_path / "a.0" / "stdout").write_text("of another job\n")
    shown = output({1: "0", 2: "0"}, tmp_path, prefix=False)
    shown.pump("stdout", io.BytesIO(b"[1] first\n[2] second\n"))
    shown.finish()
    assert (tmp_path / "a.0" / "stdout").read_text() == "first\nsecond\n"
