"""How much probes carry on links of any speed."""

import pytest

from sirtaki.autotune.knobs import KIB, MIB
from sirtaki.engine.tuning.probes import (
    LEAST_LARGE_BYTES,
    NEEDED_FIRST,
    PASSES,
    SHAPES,
    SMALL_BYTES,
    SOUNDING_BYTES,
    STREAM_BYTES,
    ProbeBudget,
    ProbeSize,
)


class Link:
    """Takes as long as it takes: streams share the link, and none gets more than a flow may have."""

    def __init__(self, *, alpha_s: float, link_bytes_per_s: float, flow_bytes_per_s: float) -> None:
        self.alpha_s, self._link, self._flow = alpha_s, link_bytes_per_s, flow_bytes_per_s

    def round_s(self, unit_bytes: int, streams: int) -> float:
        return self.alpha_s + unit_bytes / min(self._flow, self._link / streams)

    def probed(self, budget_s: float) -> tuple[list[tuple[ProbeSize, int]], float]:
        """Probes of one route, and what they take in all."""
        small, large = SOUNDING_BYTES
        budget = ProbeBudget((self.round_s(small, 1), self.round_s(large, 1)))
        spent_s = (1 + PASSES) * (self.round_s(small, 1) + self.round_s(large, 1))
        taken = []
        for number, (unit_bytes, streams) in enumerate(SHAPES):
            needed_more = max(0, NEEDED_FIRST - number)
            size = budget.size(unit_bytes, streams, left_s=budget_s - spent_s, needed_more=needed_more)
            if size is not None and (size, streams) not in taken:
                round_s = self.round_s(size.unit_bytes, streams)
                spent_s += (1 + PASSES) * size.rounds * round_s
                budget.learn(streams=streams, unit_bytes=size.unit_bytes, round_s=round_s)
                taken.append((size, streams))
        return taken, spent_s


def test_where_the_link_is_fast_every_stream_carries_all() -> None:
    taken, _ = Link(alpha_s=1e-4, link_bytes_per_s=1e9, flow_bytes_per_s=1e9).probed(1.0)
    assert [(size.unit_bytes, streams) for size, streams in taken] == list(SHAPES)
    assert {size.unit_bytes * size.rounds for size, _ in taken} == {STREAM_BYTES}


@pytest.mark.parametrize("budget_s", [1.0, 2.0, 5.0])
@pytest.mark.parametrize(
    "link",
    [
        Link(alpha_s=1e-3, link_bytes_per_s=8e6, flow_bytes_per_s=8e6),
        Link(alpha_s=1e-3, link_bytes_per_s=3e7, flow_bytes_per_s=2e6),
        Link(alpha_s=0.03, link_bytes_per_s=3e7, flow_bytes_per_s=8e6),
        Link(alpha_s=0.03, link_bytes_per_s=1e9, flow_bytes_per_s=1e9),
    ],
)
def test_a_slow_link_is_probed_within_the_budget_in_two_sizes_and_on_several_streams(
    link: Link, budget_s: float
) -> None:
    taken, spent_s = link.probed(budget_s)
    assert spent_s <= budget_s
    assert len({size.unit_bytes for size, streams in taken if streams == 1}) > 1
    assert any(streams > 1 for _, streams in taken)


def test_many_streams_are_probed_where_each_flow_is_capped() -> None:
    taken, _ = Link(alpha_s=1e-3, link_bytes_per_s=3e7, flow_bytes_per_s=8e5).probed(3.5)
    assert 16 in {streams for _, streams in taken}


def test_what_is_needed_is_probed_by_the_least_that_tells_something_however_late_it_is() -> None:
    budget = ProbeBudget((1.0, 20.0))
    assert budget.size(SMALL_BYTES, 1, left_s=-1.0, needed_more=3) == ProbeSize(unit_bytes=SMALL_BYTES, rounds=1)
    assert budget.size(MIB, 4, left_s=-1.0, needed_more=1) == ProbeSize(unit_bytes=LEAST_LARGE_BYTES, rounds=1)
    assert budget.size(MIB, 4, left_s=-1.0, needed_more=0) is None


def test_start_up_costs_rounds_not_bytes() -> None:
    slow_start = ProbeBudget((0.1, 0.101))
    size = slow_start.size(SMALL_BYTES, 1, left_s=2.0, needed_more=1)
    assert size is not None
    assert size.unit_bytes == 64 * KIB
    assert size.rounds < STREAM_BYTES // SMALL_BYTES
