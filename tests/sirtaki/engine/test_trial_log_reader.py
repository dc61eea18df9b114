import json

import pytest
from fakes.trial_logs import JOB, knobs, trial

from sirtaki.engine.trial_log_reader import read_log
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
