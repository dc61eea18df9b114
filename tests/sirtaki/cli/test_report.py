import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from sirtaki.autotune.knobs import KIB, Cut, Knobs
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.profile import Profile
from sirtaki.cli.__main__ import main
from sirtaki.cli.report import render, write_report
from sirtaki.cli.svg import nice_ticks
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.trial_log_reader import read_log
from sirtaki.errors import ConfigError
from sirtaki.link_model import LinkModel


def knobs(unit_kib=1024, streams=1, cuts=None):
    return Knobs(unit_bytes=unit_kib * KIB, streams=streams, transport=TransportKind.GLOO, cuts=cuts)


def trial(iteration, arm, setting, span_s, best_s, purpose="trial"):
    return {
        "event": "trial",
        "iteration": iteration,
        "arm": arm,
        "purpose": purpose,
        "knobs": setting.to_json(),
        "spans_s": [span_s, span_s],
        "best_span_s": best_s,
        "auc": {"grid": 0.5, "pbt": 1 / iteration},
    }


RESULT = {
    "event": "result",
    "iteration": 20,
    "arm": "grid",
    "knobs": knobs(512, 4).to_json(),
    "default_span_s": 0.2,
    "best_span_s": 0.1,
    "noise_s": 0.001,
    "n_trials": 4,
    "reason": "the budget was used up",
    "tuned": True,
}
PLANNING = PlanningModel(
    layout=GradientLayout(sizes=(100_000, 200_000)),
    profile=Profile.from_durations([0.01, 0.02]),
    links={(TransportKind.GLOO, Algorithm.FLAT): LinkModel(alpha_s=1e-3, throughput=(1e8, 2e8))},
)
MODEL = {"event": "model", **PLANNING.to_json()}
JOB = [
    trial(3, "default", knobs(25 * 1024), 0.2, 0.2, "default"),
    trial(6, "grid", knobs(512, 4), 0.1, 0.1),
    trial(9, "pbt", knobs(64, 8), 0.3, 0.1),
    trial(12, "<b>bold</b>", knobs(64, 2), None, 0.1),
    RESULT,
]


@pytest.fixture
def log_of(tmp_path):
    def write(*records):
        path = tmp_path / "trials.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def svgs(page):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


def test_the_page_says_what_was_kept_and_what_it_gained(log_of):
    page = render(read_log(log_of(*JOB)))
    assert "512 KiB units, 4 streams" in page
    assert "200 ms by default (2.00× faster)" in page
    assert "A step takes" not in page  # the log does not say
    assert "the budget was used up" in page


def test_the_page_says_what_steps_gain_where_the_log_knows(log_of):
    page = render(read_log(log_of(*JOB[:-1], {**RESULT, "backward_s": 0.08, "between_s": 0.1})))
    assert "A step takes 200 ms, 300 ms by default (1.50× faster)" in page
    assert "does not hide 20 ms of its communication, 120 ms by default" in page


def test_a_kept_setting_that_is_not_the_fastest_of_all_is_explained(log_of):
    lucky = trial(12, "pbt", knobs(64, 1), 0.05, 0.05)
    finals = [
        trial(14, "pbt", knobs(64, 1), 0.12, 0.1, "finals"),
        trial(16, "grid", knobs(512, 4), 0.1, 0.1, "finals"),
    ]
    page = render(read_log(log_of(*JOB[:-1], lucky, *finals, RESULT)))
    assert "The first row is not what was kept: of many measurements, one is short by luck." in page
    assert "took: gloo flat, 512 KiB units, 4 streams 100 ms, gloo flat, 64 KiB units, 1 stream 120 ms" in page
    assert "The first row is not" not in render(read_log(log_of(*JOB)))


def test_a_credit_that_is_zero_for_all_is_said(log_of):
    flat = [{**record, "auc": {"grid": 0.0}} for record in JOB[:-1]]
    assert "None has found a setting that is clearly better" in render(read_log(log_of(*flat, RESULT)))
    assert "None has found" not in render(read_log(log_of(*JOB)))


def test_every_measurement_is_a_mark_with_its_setting(log_of):
    first, *_ = svgs(render(read_log(log_of(*JOB))))
    titles = [element.text for element in first.iter() if element.tag.endswith("title")]
    assert len(titles) == 4
    assert titles[1] == "100 ms: grid, gloo flat, 512 KiB units, 4 streams"
    assert titles[3].startswith("failed: ")


def test_the_page_needs_no_other_file_and_runs_nothing(log_of):
    page = render(read_log(log_of(MODEL, *JOB)))
    assert "<script" not in page
    assert not re.search(r'(src|href)="', page)


def test_names_from_the_log_are_shown_and_not_obeyed(log_of):
    page = render(read_log(log_of(*JOB)))
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<b>bold" not in page


def test_tags_are_closed_and_the_plots_are_well_formed(log_of):
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
    assert len(svgs(page)) == 3


def test_with_the_jobs_model_the_default_and_the_winner_are_drawn_as_timelines(log_of):
    planned = knobs(512, 2, cuts=(Cut(stop=100_000), Cut(stop=300_000, stream=1)))
    records = [MODEL, JOB[0], trial(6, "mg_wfbp", planned, 0.1, 0.1)]
    plots = svgs(render(read_log(log_of(*records))))
    assert len(plots) == 5
    boxes = [element for element in plots[4].iter() if element.tag.endswith("rect")]
    assert len(boxes) == 1 + 2  # the backward pass and two units


def boxes_of(plot):
    """Opacity of the boxes of each row, by their tooltip's first word."""
    found = {}
    for element in plot.iter():
        if element.tag.endswith("rect"):
            found.setdefault(element[0].text.split(":")[0], []).append(float(element.get("fill-opacity")))
    return found


def test_the_credit_of_each_arm_is_drawn_as_the_job_wrote_it(log_of):
    rows = boxes_of(svgs(render(read_log(log_of(*JOB))))[2])
    assert len(set(rows["grid"])) == 1  # stays at 0.5
    assert rows["pbt"] == sorted(rows["pbt"], reverse=True)
    assert len(set(rows["pbt"])) == 4  # falls with each trial


def predicted(record, predicted_s, agreement=0.8, *, believed=True):
    return {**record, "predicted_s": predicted_s, "agreement": agreement, "believed": believed}


def test_planners_have_no_row_of_credit_while_their_model_is_not_believed(log_of):
    credits = {"auc": {"grid": 0.5, "libra": 0.5}}
    records = [predicted({**record, **credits}, 0.1, believed=record is JOB[0]) for record in JOB[:3]]
    rows = boxes_of(svgs(render(read_log(log_of(*records))))[2])
    assert (len(rows["grid"]), len(rows["libra"])) == (3, 1)


def test_every_prediction_is_drawn_against_what_was_measured(log_of):
    records = [predicted(JOB[0], 0.21), predicted(JOB[1], 0.05), JOB[2], RESULT]
    page = render(read_log(log_of(*records)))
    assert "<h2>Predicted and measured</h2>" in page
    titles = [element.text for element in svgs(page)[3].iter() if element.tag.endswith("title")]
    assert [title.split(":")[0] for title in titles] == [
        "predicted 210 ms, measured 200 ms",
        "predicted 50 ms, measured 100 ms",
    ]
    assert "predicted to be faster in 90 % of the cases" in page
    assert "were not asked any more" not in page


def test_a_model_that_was_doubted_is_said_to_be(log_of):
    records = [predicted(JOB[0], 0.21), predicted(JOB[1], 0.5, -0.6, believed=False), RESULT]
    page = render(read_log(log_of(*records)))
    assert "predicted to be faster in 20 % of the cases" in page
    assert "From iteration 6 on it was below 70 %, so planners were not asked any more." in page


def test_without_predictions_nothing_is_said_of_them(log_of):
    assert "Predicted and measured" not in render(read_log(log_of(MODEL, *JOB)))


def test_the_terminal_shows_what_the_page_says(log_of, tmp_path, capsys):
    log = log_of(predicted(JOB[0], 0.21), predicted(JOB[1], 0.05), *JOB[2:])
    assert main(["report", str(log), "-o", str(tmp_path / "page.html")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Kept: gloo flat, 512 KiB units, 4 streams, proposed by grid." in said
    assert "100 ms 50 ms gloo flat, 512 KiB units, 4 streams grid 6" in said
    assert "predicted to be faster in 90 % of the cases" in said
    assert "how many of them were the best so far: grid 1 (1), pbt 1 (0), <b>bold</b> 1 (0)." in said
    assert said.endswith("page.html")


def test_a_log_without_credits_has_no_plot_of_them(log_of):
    plain = [{key: value for key, value in record.items() if key != "auc"} for record in JOB]
    page = render(read_log(log_of(*plain)))
    assert "trusted" not in page
    assert len(svgs(page)) == 2


def test_with_the_jobs_model_the_bound_is_drawn_and_told(log_of):
    assert PLANNING.bound_s == pytest.approx(0.02)  # from the first ready gradient to the last
    page = render(read_log(log_of(MODEL, *JOB)))
    assert "No plan can take less than 20 ms" in page
    first = svgs(page)[0]
    dashed = [element for element in first.iter() if element.get("stroke-dasharray")]
    assert len(dashed) == 2  # default and bound
    assert len([e for e in svgs(render(read_log(log_of(*JOB))))[0].iter() if e.get("stroke-dasharray")]) == 1


def test_no_setting_is_shown_below_the_bound(log_of):
    slow = {**MODEL, "links": [{**link, "link": {**link["link"], "throughput": [1e6]}} for link in MODEL["links"]]}
    log = read_log(log_of(slow, *JOB))
    assert log.model.bound_s > log.fastest_s  # the probes were too pessimistic
    assert log.bound_s == log.fastest_s
    page = render(log)
    assert "No plan can take less" not in page
    assert "the bound is drawn at the fastest setting, 100 ms" in page


def test_default_and_winner_stand_side_by_side(log_of):
    page = render(read_log(log_of(MODEL, *JOB)))
    assert page.count('<div class="pair"><div>') == 1
    assert page.index("untuned default:") < page.index("kept:")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (knobs(512, 4), "in units of 512 KiB: smaller gradients are packed, larger ones cut; up to 4 at the same time"),
        (knobs(64, 1), "one at a time, over gloo, all ranks alike."),
        (knobs(64, 2, cuts=(Cut(stop=10), Cut(stop=20))), "in 2 units whose sizes a planner chose"),
        (replace(knobs(), algorithm=Algorithm.HIERARCHICAL), "first inside each node, then between nodes."),
        (replace(knobs(), threads=1024), "with 1024 GPU threads each"),
    ],
)
def test_the_chosen_knobs_are_told_in_words(log_of, setting, words):
    record = RESULT | {"knobs": setting.to_json()}
    assert words in render(read_log(log_of(*JOB[:-1], record)))


def test_a_setting_of_a_route_that_was_not_measured_has_no_timeline(log_of):
    elsewhere = replace(knobs(), transport=TransportKind.MPI)
    page = render(read_log(log_of(MODEL, JOB[0], trial(6, "grid", elsewhere, 0.1, 0.1))))
    assert len(svgs(page)) == 3
    assert "No timeline: that job's probes did not show what mpi flat" in page


def test_a_job_that_was_cut_short_shows_its_best_so_far(log_of):
    outcome = read_log(log_of(*JOB[:3])).outcome
    assert (outcome.arm, outcome.span_s, outcome.default_span_s) == ("grid", 0.1, 0.2)


def of_one_tuner(*records):
    return [{**record, "version": 2, "tuner": "1f2e"} for record in records]


def test_a_re_tune_is_told_and_leaves_what_the_warm_up_has_found_as_it_is(log_of):
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


def test_of_a_re_tune_that_found_nothing_or_did_not_end_that_is_said(log_of):
    retune = {"event": "retune", "iteration": 112, "ratio": None, "running": RESULT["knobs"]}
    assert "the log ends before another setting was chosen" in render(read_log(log_of(*of_one_tuner(*JOB, retune))))
    assert "nothing better was found" in render(read_log(log_of(*of_one_tuner(*JOB, retune, RESULT))))


def test_of_several_jobs_in_a_file_the_last_counts(log_of):
    second = [trial(2, "default", knobs(64), 0.5, 0.5, "default")]
    assert len(read_log(log_of(*JOB, *second)).measurements) == 1
    assert len(read_log(log_of(*JOB[:3], *second)).measurements) == 1


def test_lines_of_another_kind_are_skipped(log_of):
    assert len(read_log(log_of({"event": "weather"}, *JOB, {"event": "sunset"})).measurements) == 4


def test_a_plain_record_with_one_span_is_read_too(log_of):
    record = {"iteration": 1, "arm": "a", "purpose": "trial", "knobs": knobs().to_json(), "span_s": 0.5, "noise_s": 0.0}
    (measurement,) = read_log(log_of({**record, "was_best": True, "status": "complete"})).measurements
    assert (measurement.span_s, measurement.was_best) == (0.5, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no measured trial"),
        ("nonsense\n", "line 1"),
        ("[1]\n", "an object was expected"),
        ('{"knobs": {}, "iteration": 1}\n', "line 1"),
        (json.dumps(trial(3, "x", knobs(), -1.0, None)) + "\n", "a time of -1.0 s"),
        (json.dumps(trial(3, "x", knobs(), None, None)) + "\n", "no measured trial"),
    ],
)
def test_what_is_no_log_is_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "trials.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_log(path)


def test_a_missing_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        write_report(tmp_path / "nowhere", tmp_path / "page.html")


def test_the_page_is_written(log_of, tmp_path):
    write_report(log_of(*JOB), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 97.3), (0, 1e-4), (3, 3), (0, 100)])
def test_ticks_are_few_round_and_inside(low, high):
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    assert all(low <= tick <= high + 1e-9 for tick in ticks)
