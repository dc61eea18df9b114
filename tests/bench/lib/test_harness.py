import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib import harness
from bench.lib.harness import Bar, Report, Spread, alternate, finish, parser, ratios, take_result

SAMPLES = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=20)


def a_report(*, value: float) -> Report:
    return Report(
        name="trial",
        rows=[{"what": "step", "step_s": Spread.of([0.1, 0.2, 0.3]), "samples_s": [0.1, 0.2, 0.3]}],
        bars=[Bar(claim="the step / the peer's", value=value, limit=1.0)],
    )


@given(samples=SAMPLES)
def test_a_spread_is_in_order_and_within_its_samples(samples):
    spread = Spread.of(samples)
    assert spread.minimum <= spread.low <= spread.median <= spread.high <= spread.maximum
    assert (spread.minimum, spread.maximum, spread.n) == (min(samples), max(samples), len(samples))


@given(samples=SAMPLES)
def test_a_contender_s_ratio_to_itself_is_one(samples):
    assert ratios(samples, samples).minimum == ratios(samples, samples).maximum == 1.0


def test_ratios_compare_samples_of_the_same_round():
    assert ratios([1.0, 20.0], [2.0, 40.0]) == Spread.of([0.5, 0.5])


def test_contenders_alternate_and_take_turns_at_being_first():
    order: list[str] = []

    def contender(name: str):
        def measure() -> float:
            order.append(name)
            return float(len(order))

        return measure

    samples = alternate({"a": contender("a"), "b": contender("b")}, rounds=3)
    assert "".join(order) == "abbaab"
    assert samples == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_the_file_holds_figures_spread_machine_versions_and_seed(tmp_path):
    path = tmp_path / "results" / "trial.json"
    args = parser("a trial").parse_args(["--json", str(path), "--seed", "7"])
    assert finish(a_report(value=0.5), args) == 0
    written = json.loads(path.read_text())
    assert written["rows"][0]["step_s"]["median"] == 0.2
    assert written["rows"][0]["samples_s"] == [0.1, 0.2, 0.3]
    assert written["bars"] == [{"claim": "the step / the peer's", "value": 0.5, "limit": 1.0, "unit": "", "met": True}]
    assert written["settings"]["seed"] == 7
    assert {"python", "torch"} <= written["versions"].keys()
    assert written["machine"]["cores"] >= 1


def test_the_command_can_be_given_again(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench/trial.py", "--save", "--only", "two words", "--check"])
    assert a_report(value=0.5).to_json()["command"] == "python -m bench.trial --only 'two words' --check"


def test_saving_keeps_a_summary_apart_from_the_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "RAW", tmp_path / "raw")
    assert finish(a_report(value=0.5), parser("a trial").parse_args(["--save"])) == 0
    assert "samples" not in (tmp_path / "trial.md").read_text()
    assert json.loads((tmp_path / "raw" / "trial.json").read_text())["rows"][0]["samples_s"] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(("value", "status"), [(0.99, 0), (1.01, 1), (float("nan"), 1)])
def test_check_fails_with_the_figure_that_misses_its_bar(value, status, capsys):
    assert finish(a_report(value=value), parser("").parse_args(["--check"])) == status
    said = capsys.readouterr()
    assert ("missed: the step / the peer's" in said.err) == bool(status)


def test_without_check_a_missed_bar_is_said_and_no_failure(capsys):
    assert finish(a_report(value=2.0), parser("").parse_args([])) == 0
    assert "MISSED the step / the peer's: 2" in capsys.readouterr().out


def test_seconds_are_shown_as_milliseconds_and_raw_samples_are_not(capsys):
    finish(a_report(value=1.0), parser("").parse_args([]))
    table = capsys.readouterr().out
    assert "step ms" in table
    assert "200 (150–250)" in table
    assert "samples" not in table


def test_a_rank_hands_its_result_to_the_process_that_started_it(capsys):
    harness.give_result({"samples": [1.5]})
    assert take_result("noise\n" + capsys.readouterr().out + "more noise\n") == {"samples": [1.5]}


def test_ranks_without_a_result_are_an_error_that_shows_what_they_said():
    with pytest.raises(RuntimeError, match="without a result: noise"):
        take_result("noise")


def test_a_rank_reads_the_options_it_was_started_with(monkeypatch):
    monkeypatch.setattr("sys.argv", ["step.py", *harness.rank_argv("bench.step", {"rounds": 3})[3:]])
    assert harness.rank_options() == {"rounds": 3}


def test_a_benchmark_started_by_hand_is_no_rank(monkeypatch):
    monkeypatch.setattr("sys.argv", ["step.py", "--quick", "--check"])
    assert harness.rank_options() is None


def test_ranks_remember_nothing_unless_the_user_says_where(monkeypatch):
    assert harness.rank_env()["SIRTAKI_REGISTRY"] == "off"
    monkeypatch.setenv("SIRTAKI_REGISTRY", "/somewhere.db")
    assert harness.rank_env()["SIRTAKI_REGISTRY"] == "/somewhere.db"
