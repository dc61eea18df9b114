import pytest
from fakes.played_jobs import record
from fakes.replays import over_a_link

from sirtaki.analysis.job_model import histories
from sirtaki.analysis.recording import Detail
from sirtaki.analysis.timeline_plot import Kind, step_parts


@pytest.mark.parametrize("detail", Detail)
def test_the_parts_of_each_rank_add_up_to_its_mean_step(detail: Detail) -> None:
    recording = record(over_a_link(ranks=3, iterations=3), detail=detail)
    found = step_parts(histories(recording))
    assert [one.rank for one in found] == [0, 1, 2]
    for one in found:
        iterations = recording.ranks[one.rank].iterations
        mean_s = sum(each.end_s - each.begin_s for each in iterations) / len(iterations)
        assert one.step_s == pytest.approx(mean_s)


def test_parts_are_what_the_job_was_made_of() -> None:
    (one, *_) = step_parts(histories(record(over_a_link())))
    assert one.seconds[Kind.FORWARD] == pytest.approx(0.02)
    assert one.seconds[Kind.BACKWARD] == pytest.approx(0.08)
    assert one.seconds[Kind.COPY] == pytest.approx(0.003)
    assert one.seconds[Kind.UPDATE] == pytest.approx(0.01)
    assert one.seconds[Kind.EXPOSED] > 0.01
