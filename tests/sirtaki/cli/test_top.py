"""`sirtaki top` shows the jobs of this machine."""

import json
import time
from pathlib import Path

import pytest

from sirtaki.cli.__main__ import main
from sirtaki.cli.top import row, table
from sirtaki.watch.watchers import JobBeacon

JOB = {
    "script": "train.py", "pid": 12, "rank": 0, "ranks": 4, "generation": 2, "began_s": 0.0, "iteration": 120,
    "tuning": False, "setting": "gloo flat", "gain": 1.5, "step_s": 0.2, "communication_s": 0.1, "exposed_s": 0.05,
}  # fmt: skip


def test_a_row_shows_a_jobs_state_and_unknown_values_are_empty() -> None:
    shown = row({**JOB, "began_s": time.time() - 3725})
    assert shown == [
        "train.py (12)", "0 of 4, generation 2", "1:02:05", "120", "200 ms", "100 ms", "25 %",
        "gloo flat, 1.50× faster",
    ]  # fmt: skip
    unknown = {name: value for name, value in JOB.items() if not name.endswith("_s") or name == "began_s"}
    shown = row({**unknown, "gain": 1.001, "tuning": True, "generation": 0})
    assert (shown[1], shown[4:]) == ("0 of 4", ["", "", "", "tuning: gloo flat"])
    assert table([]) == "No Sirtaki job of this user is running on this machine."


def test_jobs_are_found_and_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    presence = JobBeacon(lambda: dict(JOB))
    try:
        assert main(["top", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == [JOB]
        assert main(["top", "--csv"]) == 0
        assert capsys.readouterr().out.splitlines()[0].startswith("script,pid,rank")
        assert main(["top", "--once"]) == 0
        assert "train.py" in capsys.readouterr().out
    finally:
        presence.close()
