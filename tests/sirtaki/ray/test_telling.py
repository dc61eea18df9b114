"""A function that raises in a process that goes on: the job of this rank ends."""

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH, UNTUNED

import sirtaki.torch as hvd
from sirtaki.ray.telling import call_telling_others, leave_job


def test_results_pass_and_the_job_goes_on() -> None:
    hvd.init()
    assert call_telling_others(lambda: 3) == 3
    assert hvd.is_initialized()
    hvd.shutdown()


def test_an_error_passes_and_ends_the_job_so_that_another_one_can_begin() -> None:
    hvd.init()

    def fail() -> None:
        raise LookupError("nothing")

    with pytest.raises(LookupError, match="nothing"):
        call_telling_others(fail)
    assert not hvd.is_initialized()
    leave_job("again is harmless")
    hvd.init()
    assert hvd.size() == 1
    hvd.shutdown()


def test_the_other_ranks_hear_of_it_and_all_can_begin_anew(run_ranks: RunRanks) -> None:
    assert run_ranks("ray_telling.py", 2, env={**UNTUNED, **OVER_MESH}).stdout.count("went on") == 2
