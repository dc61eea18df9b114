"""`sirtaki report` of a tuning log."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import RunRanks
from fakes.pages import figures
from fakes.trial_logs import JOB, MODEL, PLANNING, RESULT, TABLE, knobs, predicted, trial

from sirtaki.autotune.knobs import Cut
from sirtaki.cli.__main__ import main
from sirtaki.cli.report import render, write_report
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.tuning.trial_log import read_log
from sirtaki.errors import ConfigError

# ── report ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_measurement_is_a_mark_with_its_setting_on_a_complete_page(log_of):
    class Balance(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    page = render(read_log(log_of(*JOB)))
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    first, *others = figures(page)
    assert (len(first.texts()), len(others)) == (4, 2)
    assert "100 ms: grid, gloo flat, 512 KiB units, 4 streams" in first.texts()
    (failed,) = [trace for trace in first.traces if trace.get("hovertext", [""])[0].startswith("failed: ")]
    assert failed["marker"]["symbol"] == ["x-thin-open"]
    assert not re.search(r'(src|href)="', page.partition("<body>")[2])


def test_with_the_jobs_model_the_default_and_the_winner_are_drawn_as_timelines(log_of):
    planned = knobs(512, 2, cuts=(Cut(stop=100_000), Cut(stop=300_000, stream=1)))
    records = [MODEL, JOB[0], trial(6, "mg_wfbp", planned, 0.1, 0.1)]
    plots = figures(render(read_log(log_of(*records))))
    assert len(plots) == 5
    (boxes,) = plots[4].traces
    assert boxes["y"] == ["compute", "stream 0", "stream 1"]  # the backward pass and two units
    assert boxes["x"][0] == pytest.approx(30.0)
    axis = plots[4].layout["yaxis"]
    assert (axis["categoryarray"], axis["dtick"]) == (["compute", "stream 0", "stream 1"], 1)


def test_the_terminal_shows_the_same_facts_as_the_page(log_of, tmp_path, capsys):
    log = log_of(predicted(JOB[0], 0.21), predicted(JOB[1], 0.05), *JOB[2:])
    assert main(["report", str(log), "-o", str(tmp_path / "page.html")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Kept: gloo flat, 512 KiB units, 4 streams, proposed by grid." in said
    assert "100 ms 50 ms gloo flat, 512 KiB units, 4 streams grid 6" in said
    assert "predicted to be faster in 90 % of the cases" in said
    assert "how many of them were the best so far: grid 1 (1), pbt 1 (0), <b>bold</b> 1 (0)." in said
    assert said.endswith("page.html")


def test_a_kept_default_is_reported_without_a_comparison(log_of, tmp_path, capsys):
    stayed = RESULT | {"arm": "default", "knobs": knobs(25 * 1024).to_json(), "best_span_s": 0.2, "tuned": False}
    assert main(["report", str(log_of(JOB[0], stayed)), "-o", str(tmp_path / "page.html")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Kept: the default, gloo flat, " in said
    assert "by default (" not in said


def test_a_log_that_ends_before_the_tuning_phase_has_kept_nothing(log_of, tmp_path, capsys):
    for length, best in (
        (1, "gloo flat, 25 MiB units, 1 stream. "),
        (4, "gloo flat, 512 KiB units, 4 streams, proposed by grid; "),
    ):
        assert main(["report", str(log_of(*JOB[:length])), "-o", str(tmp_path / "page.html")]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "The log ends before the tuning phase does, so no setting was kept." in said
        assert f"The best setting so far: {best}" in said
        assert "Kept: " not in said
        assert "× faster" not in said


def test_with_the_jobs_model_the_lower_bound_is_drawn_and_reported(log_of):
    assert PLANNING.bound_s == pytest.approx(0.02)  # from the first ready gradient to the last
    page = render(read_log(log_of(MODEL, *JOB)))
    assert "No plan can take less than 20 ms" in page

    def dashed(page):
        return {trace["name"]: trace["y"] for trace in figures(page)[0].traces if "dash" in trace.get("line", {})}

    assert dashed(page) == {"untuned": [200, 200], "bound": pytest.approx([20, 20])}
    assert list(dashed(render(read_log(log_of(*JOB))))) == ["untuned"]


def test_no_setting_is_shown_below_the_bound(log_of):
    slow = {**MODEL, "links": [{**link, "link": {**link["link"], "throughput": [1e6]}} for link in MODEL["links"]]}
    log = read_log(log_of(slow, *JOB))
    assert log.model.bound_s > log.fastest_s  # the probes were too pessimistic
    assert log.bound_s == log.fastest_s
    page = render(log)
    assert "No plan can take less" not in page
    assert "the bound is drawn at the fastest setting, 100 ms" in page


def test_a_setting_of_a_route_that_was_not_measured_has_no_timeline(log_of):
    elsewhere = knobs().but(transport=TransportKind.MPI)
    page = render(read_log(log_of(MODEL, JOB[0], trial(6, "grid", elsewhere, 0.1, 0.1))))
    assert len(figures(page)) == 3
    assert "No timeline: that job&#39;s probes did not show what mpi flat" in page


def test_a_missing_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        write_report(tmp_path / "nowhere", tmp_path / "page.html")


# ── report sparse ─────────────────────────────────────────────────────────────────────────────────────────────────

OF = {"version": 2, "tuner": "a", "process": "p"}

HOT_COLD = "hot_cold (300 hot rows, the others by owner)"

HOT = {
    **TABLE,
    "name": "<b>hot</b>",
    "plan": HOT_COLD,
    "ways": [{"plan": HOT_COLD, "predicted_s": None, "measured_s": None, "n_bytes": 1e6}],
}


@pytest.fixture
def log_with(log_of):
    return lambda *records: log_of(*({**record, **OF} for record in records))


def cells(page):
    table = page[page.index("<h2>Sparse gradients</h2>") :]
    rows = re.findall(r"<tr>(.*?)</tr>", table[: table.index("</table>")])
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in rows[1:]]


def test_a_row_of_the_table_has_touched_rows_algorithm_and_saving(log_with):
    page = render(read_log(log_with(*JOB, TABLE)))
    assert cells(page) == [
        [
            "■ table",
            "200000 × 64",
            "4.50%",
            "300: 40%",
            "gather",
            "gather 60 ms, 2.34 (predicted 50 ms); owner 70 ms, 2.5 (predicted 40 ms)",
            "2.34",
            "76.8",
            "6.49",
        ]
    ]
    assert "a rank receives 2.34 MB in an iteration; dense it would be 76.8 MB (33 times as much)" in page
    assert "by Horovod&#39;s rule 6.49 MB (2.8 times as much)" in page


def test_untried_algorithms_and_uncounted_accesses_are_empty(log_with):
    fixed = {**HOT, "curve": [], "popular_rows": 0}
    page = render(read_log(log_with(*JOB, fixed)))
    assert cells(page)[0][3:6] == ["", HOT_COLD, ""]
    assert len(figures(page)) == len(figures(render(read_log(log_with(*JOB)))))


def test_each_parameter_is_a_curve_with_a_dot_at_its_popular_rows(log_with):
    page = render(read_log(log_with(*JOB, TABLE, HOT)))
    curves = figures(page)[-1]
    assert sum(trace["mode"] == "lines" for trace in curves.traces) == 2
    hot = "&lt;b&gt;hot&lt;/b&gt;"  # Plotly shows it unescaped, and would take tags for tags
    assert curves.texts() == ["table: 300 rows are 40% of touches", f"{hot}: 300 rows are 40% of touches"]
    assert "<b>hot" not in page


def test_the_terminal_reports_sparse_gradients_also_where_all_are_sparse(log_with, capsys):
    for records in ([*JOB, TABLE], [TABLE]):
        assert main(["report", str(log_with(*records))]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "Sparse gradients: a rank receives 2.34 MB" in said
        assert "table (200000 × 64): 4.50% of rows in an iteration, 300 of them get 40% of accesses; by gather" in said
    assert said.startswith("No settings were tried: this optimizer's gradients are all sparse.")


# ── report trust ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_credit_of_zero_for_all_arms_is_reported(log_of):
    flat = [{**record, "auc": {"grid": 0.0}} for record in JOB[:-1]]
    assert "None has found a setting that is clearly better" in render(read_log(log_of(*flat, RESULT)))
    assert "None has found" not in render(read_log(log_of(*JOB)))


def credits_of(page):
    """Credits of each row of the plot, by arm."""
    plot = figures(page)[2]
    return dict(zip(plot.layout["yaxis"]["ticktext"], plot.traces[0]["z"], strict=True))


def test_the_credit_of_each_arm_is_drawn_as_the_job_wrote_it(log_of):
    rows = credits_of(render(read_log(log_of(*JOB))))
    assert rows == {"grid": [0.5] * 4, "pbt": pytest.approx([1 / 3, 1 / 6, 1 / 9, 1 / 12])}


def test_planners_have_no_row_of_credit_while_their_model_is_not_believed(log_of):
    credits = {"auc": {"grid": 0.5, "libra": 0.5}}
    records = [predicted({**record, **credits}, 0.1, believed=record is JOB[0]) for record in JOB[:3]]
    assert credits_of(render(read_log(log_of(*records)))) == {"grid": [0.5] * 3, "libra": [0.5, None, None]}


def test_every_prediction_is_drawn_against_its_measurement_and_a_distrusted_model_is_named(log_of):
    page = render(read_log(log_of(predicted(JOB[0], 0.21), predicted(JOB[1], 0.05), JOB[2], RESULT)))
    assert "<h2>Predicted and measured</h2>" in page
    titles = figures(page)[3].texts()
    drawn = ["predicted 210 ms, measured 200 ms", "predicted 50 ms, measured 100 ms"]
    assert [title.split(":")[0] for title in titles] == drawn
    assert "predicted to be faster in 90 % of the cases" in page
    assert "In the median, measured times were 1.5 times the predicted ones." in page
    assert "too little to believe it" not in page
    doubted = [predicted(JOB[0], 0.21), predicted(JOB[1], 0.5, -0.6, believed=False), RESULT]
    page = render(read_log(log_of(*doubted)))
    assert "predicted to be faster in 20 % of the cases" in page
    assert "From iteration 6 on that was too little to believe it, so planners were not asked." in page


def test_every_line_and_every_arm_has_a_legend_and_an_arm_without_trials_and_credit_has_no_row(log_of):
    idle = [{**record, "auc": {**record["auc"], "dpro": 0.0}} for record in JOB[:-1]]
    records = [predicted(idle[0], 0.21), predicted(idle[1], 0.05), *idle[2:], RESULT]
    page = render(read_log(log_of(MODEL, *records)))
    trials, _, _, predictions, *_ = figures(page)
    assert "dpro" not in credits_of(page)
    assert [trace["name"] for trace in predictions.traces] == ["predicted exactly", "default", "grid"]
    assert predictions.layout.get("showlegend", True)
    dashes = [trace["line"]["dash"] for trace in trials.traces if trace["name"] in ("untuned", "bound")]
    assert len(set(dashes)) == 2


def test_a_trial_is_a_dot_in_its_arms_row_and_a_repetition_in_the_finals_is_none(log_of):
    def dots(*records):
        return len(figures(render(read_log(log_of(*records))))[2].texts())

    finals = {**JOB[1], "iteration": 18, "purpose": "finals"}
    assert dots(*JOB) == dots(*JOB[:-1], finals, RESULT) == 2  # the third has failed


# ── report words ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_reports_the_kept_setting_its_gain_and_known_step_times(log_of):
    page = render(read_log(log_of(*JOB)))
    assert all(words in page for words in ("512 KiB units, 4 streams", "200 ms by default (2.00× faster)"))
    assert ("A step takes" in page, "the budget was used up" in page) == (False, True)
    page = render(read_log(log_of(*JOB[:-1], {**RESULT, "backward_s": 0.08, "between_s": 0.1})))
    assert "A step takes 200 ms, 300 ms by default (1.50× faster)" in page
    assert "does not hide 20 ms of its communication, 120 ms by default" in page


def test_a_kept_setting_that_is_not_the_fastest_is_explained(log_of):
    lucky = trial(12, "pbt", knobs(64, 1), 0.05, 0.05)
    finals = [
        trial(14, "pbt", knobs(64, 1), 0.12, 0.1, "finals"),
        trial(16, "grid", knobs(512, 4), 0.1, 0.1, "finals"),
    ]
    page = render(read_log(log_of(*JOB[:-1], lucky, *finals, RESULT)))
    assert "The first row is not what was kept: of many measurements, one is short by luck." in page
    assert (
        "communication times of: gloo flat, 512 KiB units, 4 streams 100 ms, gloo flat, 64 KiB units, 1 stream 120 ms"
        in page
    )
    assert "The first row is not" not in render(read_log(log_of(*JOB)))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (knobs(512, 4), "in units of 512 KiB: smaller gradients are packed, larger ones cut; up to 4 at the same time"),
        (knobs(64, 1), "one at a time, over gloo, all ranks alike."),
        (knobs(64, 2, cuts=(Cut(stop=10), Cut(stop=20))), "in 2 units whose sizes a planner chose"),
        (knobs().but(algorithm=Algorithm.HIERARCHICAL), "first inside each node, then between nodes."),
        (knobs().but(threads=1024), "with 1024 GPU threads each"),
    ],
)
def test_the_chosen_knobs_are_described_in_words(log_of, setting, words):
    record = RESULT | {"knobs": setting.to_json()}
    assert words in render(read_log(log_of(*JOB[:-1], record)))


def of_one_tuner(*records):
    return [{**record, "version": 2, "tuner": "1f2e"} for record in records]


def test_a_re_tune_is_reported_and_the_warm_ups_result_is_unchanged(log_of):
    again = {**RESULT, "iteration": 130, "knobs": knobs(512, 1).to_json(), "default_span_s": 0.4, "best_span_s": 0.2}
    retune = {"event": "retune", "iteration": 112, "ratio": 4.04, "running": RESULT["knobs"]}
    path = log_of(*of_one_tuner(*JOB, retune, trial(115, "default", knobs(512, 4), 0.4, 0.4, "default"), again))
    log = read_log(path)
    assert [m.iteration for m in log.measurements] == [3, 6, 9, 12]
    assert log.outcome.knobs == knobs(512, 4)
    assert [m.iteration for m in log.retunes[0].measurements] == [115]
    page = render(log)
    assert "After iteration 112 communication took 4 times as long as before: from then on" in page
    assert "2.00× faster than what ran" in page


def test_a_re_tune_without_a_result_or_an_end_is_reported(log_of):
    retune = {"event": "retune", "iteration": 112, "ratio": None, "running": RESULT["knobs"]}
    assert "the log ends before another setting was chosen" in render(read_log(log_of(*of_one_tuner(*JOB, retune))))
    assert "nothing better was found" in render(read_log(log_of(*of_one_tuner(*JOB, retune, RESULT))))


# ── saved profile ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_real_jobs_log_becomes_a_report_and_a_forecast(
    run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, forecast = tmp_path / "trials.jsonl", tmp_path / "scaling.html"
    # Where other tests take the processor while links are probed, no model may fit any: such a job plans nothing.
    for _ in range(10):
        log.unlink(missing_ok=True)
        run_ranks("tuning.py", 2, 110, env={"SIRTAKI_WARMUP_ITERATIONS": "30", "SIRTAKI_TRIAL_LOG": str(log)})
        records = [json.loads(line) for line in log.read_text().splitlines()]
        if models := [record for record in records if record["event"] == "model"]:
            break
    cold, *_, model = models
    assert 0.0 < model["profile"]["forward_s"] <= cold["profile"]["forward_s"]
    assert 0.0 < model["profile"]["compute_s"] <= cold["profile"]["compute_s"]
    trials = [record for record in records if record["event"] == "trial"]
    assert all(0.0 <= credit <= 1.0 for trial in trials for credit in trial["auc"].values())
    assert {trial["arm"] for trial in trials if trial["purpose"] == "trial"} <= {*trials[-1]["auc"], "refinement"}

    assert main(["report", str(log)]) == 0
    page = log.with_suffix(".html").read_text()
    # "No plan …", or, where steps came out faster than the probes allow, what "no plan" was said to do.
    for promised in ("o plan can take less than", "Which arm was trusted when", "Gradients travel in"):
        assert promised in page
    plots = figures(page)
    # On a busy machine the probes of a route may be too far from any model; a setting on it has no timeline then.
    known = {(link["transport"], link["algorithm"]) for link in model["links"]}
    shown = {json.dumps(record["knobs"]): record["knobs"] for record in (trials[0], records[-1])}  # default, winner
    timelines = sum((knobs["transport"], knobs["algorithm"]) in known for knobs in shown.values())
    has_predictions = any(trial["predicted_s"] for trial in trials)
    # Trials, who proposed what, credits, predictions, timelines.
    assert len(plots) == 3 + has_predictions + timelines

    capsys.readouterr()
    described = ["--ranks", "2,64", "--link-gbit", "25", "--flow-gbit", "10"]
    status = main(["plan", str(log), *described, "--json", "--plot", str(forecast)])
    out, err = capsys.readouterr()
    if status:  # The model of a job on a busy machine may be too inaccurate.
        assert "does not suffice to predict this job: " in err
        return
    rows = json.loads(out)
    assert all(row["low_s"] <= row["iteration_s"] <= row["high_s"] for row in rows)
    assert {row["ranks"] for row in rows} == {2, 64}
    assert all(row["iteration_s"] > model["profile"]["forward_s"] for row in rows)
    assert len(figures(forecast.read_text())) == 2
