"""Ranks that share a host's processors."""

from __future__ import annotations

import pytest

from sirtaki.autotune.model.replayer import SharedHost
from sirtaki.errors import TuningError


def test_computation_was_measured_while_all_ranks_computed() -> None:
    host = SharedHost(ranks=4, processors=2.0)
    work = host.computation(2, 1.0)
    assert (work.seconds, work.jobs) == (0.5, 4)
    assert host.server.share(4) == 0.5  # so it takes 1 s again


def test_probes_of_units_have_shared_processors_already() -> None:
    assert SharedHost(ranks=4, processors=2.0).unit(2, 1.0, 1.0).seconds == 0.5
    work = SharedHost(ranks=2, processors=2.0).unit(2, 1.0, 0.3)
    assert (work.seconds, work.jobs) == (1.0, 0.6)


def test_a_part_of_a_processor_counts() -> None:
    assert SharedHost(ranks=3, processors=2.5).server.totals == (1.0, 2.0, 2.5)
    assert SharedHost(ranks=3, processors=0.5).server.totals == (0.5,)


def test_json_and_back() -> None:
    host = SharedHost(ranks=3, processors=2.5, threads=2)
    assert SharedHost.from_json(host.to_json()) == host


@pytest.mark.parametrize("fields", [{"ranks": 0}, {"processors": 0.0}, {"threads": 0}])
def test_a_host_of_nothing_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(TuningError, match="a host needs"):
        SharedHost(**{"ranks": 2, "processors": 2.0, **fields})  # type: ignore[arg-type]
