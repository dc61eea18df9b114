import json

import pytest
from fakes.trial_logs import JOB, TABLE, knobs, trial

from sirtaki.engine.tuning.trial_log import read_log
from sirtaki.errors import ConfigError


def test_a_job_that_was_cut_short_shows_its_best_so_far(log_of):
    outcome = read_log(log_of(*JOB[:3])).outcome
    assert (outcome.arm, outcome.span_s, outcome.default_span_s) == ("grid", 0.1, 0.2)


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


def test_a_last_line_that_was_not_written_to_its_end_is_skipped_and_only_that(log_of):
    path = log_of(*JOB)
    whole = path.read_text()
    path.write_text(whole + json.dumps(JOB[1])[:40])
    assert len(read_log(path).measurements) == 4
    path.write_text(whole + json.dumps(JOB[1])[:40] + "\n")
    with pytest.raises(ConfigError, match="line 6"):
        read_log(path)


def of(process, *records, tuner="a"):
    return [{**record, "version": 2, "tuner": tuner, "process": process} for record in records]


def test_sparse_gradients_are_those_of_the_process_that_measured_last_whichever_of_its_optimizers_has_them(log_of):
    records = [*of("p", TABLE, tuner="c"), *of("q", {**TABLE, "name": "other"}, tuner="b"), *of("p", *JOB)]
    log = read_log(log_of(*records))
    assert list(log.sparse) == ["table"]
    assert read_log(log_of(TABLE, *JOB)).sparse == {}  # nobody knows whose


def test_what_was_told_last_of_a_sparse_gradient_counts(log_of):
    again = {**TABLE, "plan": "owner"}
    assert read_log(log_of(*of("p", TABLE, *JOB, again))).sparse["table"].plan == "owner"


def test_a_log_of_sparse_gradients_alone_can_be_read(log_of):
    log = read_log(log_of(*of("p", TABLE)))
    assert (log.measurements, list(log.sparse)) == ([], ["table"])


@pytest.mark.parametrize("wrong", [{"plan": "by air"}, {"ways": []}, {"n_rows": "many"}, {"union": -1}])
def test_a_line_of_sparse_gradients_that_cannot_be_understood_is_refused(log_of, wrong):
    with pytest.raises(ConfigError, match="line 5"):
        read_log(log_of(*JOB[:4], *of("p", {**TABLE, **wrong})))
