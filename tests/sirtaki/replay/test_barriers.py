"""When units began and were done, over all ranks."""

from __future__ import annotations

from fakes.played_jobs import GLOO
from fakes.replays import over_a_link

from sirtaki.analysis.job_model import barriers
from sirtaki.analysis.recording import Collective, RecordedIteration, RecordedUnit, UnitId
from sirtaki.autotune.model.replayer import Activity


def unit(start: int, stop: int, issue_s: float, done_s: float, stream: int = 0) -> RecordedUnit:
    name = UnitId(iteration=0, buffer=0, start=start, stop=stop, route=GLOO, stream=stream)
    return RecordedUnit(unit=name, issue_s=issue_s, begin_s=None, done_s=done_s)


def iteration(*units: RecordedUnit, collectives: tuple[Collective, ...] = ()) -> RecordedIteration:
    return RecordedIteration(number=0, begin_s=0.0, end_s=10.0, units=units, collectives=collectives)


def same(moment_s: float) -> float:
    return moment_s


def test_a_unit_begins_with_its_last_rank_and_its_stream() -> None:
    free_s: dict[str, float] = {}
    found = barriers(
        {
            0: iteration(unit(0, 1000, 1.0, 4.0), unit(1000, 4000, 1.5, 6.0), unit(4000, 6500, 2.0, 3.0, 1)),
            1: iteration(unit(0, 1000, 2.0, 4.5), unit(1000, 4000, 2.5, 5.5), unit(4000, 6500, 2.6, 3.0, 1)),
        },
        {0: same, 1: same},
        over_a_link().buffers,
        free_s,
    )
    assert [(one.key[1], one.begin_s, one.end_s) for one in found] == [
        (0, 2.0, 4.0),
        (1000, 4.5, 5.5),
        (4000, 2.6, 3.0),
    ]
    assert found[0].lag_s == 0.5
    (later,) = barriers({0: iteration(unit(0, 1000, 5.0, 7.0))}, {0: same}, over_a_link().buffers, free_s)
    assert later.begin_s == 6.0


def test_nothing_is_done_before_it_began_though_clocks_differ() -> None:
    (one,) = barriers(
        {0: iteration(unit(0, 6500, 1.0, 1.5)), 1: iteration(unit(0, 6500, 2.0, 3.0))},
        {0: same, 1: lambda moment_s: moment_s + 1.0},
        over_a_link().buffers,
        {},
    )
    assert (one.begin_s, one.end_s) == (3.0, 3.0)


def test_other_operations_are_barriers_too() -> None:
    loss = Collective(name="loss", kind="allreduce", begin_s=1.0, agreed_s=1.5, end_s=2.0, n_bytes=4)
    (one,) = barriers({0: iteration(collectives=(loss,))}, {0: same}, (), {})
    assert (one.activity, one.name, one.ranks, one.end_s) == (Activity.COLLECTIVE, "loss", (0,), 2.0)
