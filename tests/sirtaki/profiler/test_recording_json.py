import json
from dataclasses import replace

import pytest
from fakes import memories, recordings

from sirtaki.analysis.recording_files import job_from_json, job_to_json, rank_from_json, rank_to_json
from sirtaki.autotune.model.fits import ContentionModel, RateCurve


def test_a_rank_comes_back_from_json_as_it_was() -> None:
    rank = recordings.rank(1, late_s=0.01)
    back = rank_from_json(json.loads(json.dumps(rank_to_json(rank))))
    assert replace(back, iterations=()) == replace(rank, iterations=())
    for mine, theirs in zip(back.iterations, rank.iterations, strict=True):
        assert mine.units[0].unit == theirs.units[0].unit
        assert mine.units[1].begin_s is None
        assert mine.operators[1].after == (0,)
        assert mine.operators[0].begin_s == pytest.approx(theirs.operators[0].begin_s, abs=1e-9)
        assert rank_to_json(replace(back, iterations=(mine,))) == rank_to_json(replace(rank, iterations=(theirs,)))


def test_modules_and_memory_come_back_from_json_as_they_were() -> None:
    rank = memories.recording().ranks[0]
    back = rank_from_json(json.loads(json.dumps(rank_to_json(rank))))
    assert (back.modules, back.memory) == (rank.modules, rank.memory)


def test_a_job_comes_back_from_json_as_it_was() -> None:
    rate = RateCurve(gamma_1=2.0, gamma_2=1.0, gamma_3=0.5)
    contention = ContentionModel(alpha_1=1.0, alpha_2=1e-4, overlapped=rate, alone=rate)
    job = replace(recordings.job(3, ranks_per_host=1), contention=contention)
    assert job_from_json(json.loads(json.dumps(job_to_json(job)))) == job


def test_names_of_operators_are_written_once() -> None:
    assert rank_to_json(recordings.rank(0))["operator_names"] == ["aten::linear", "AddmmBackward0"]
    rank = replace(memories.recording().ranks[0], memory=memories.chain())
    assert rank_to_json(rank)["memory"]["operators"] == ["", "aten::mm"]
