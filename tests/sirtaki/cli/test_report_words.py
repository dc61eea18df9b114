from dataclasses import replace

import pytest
from fakes.trial_logs import JOB, RESULT, knobs, trial

from sirtaki.autotune.knobs import Cut
from sirtaki.cli.report import render
from sirtaki.comm.plan import Algorithm
from sirtaki.engine.tuning.trial_log import read_log


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
