"""Costs of units from recorded ones and from probes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.played_jobs import GLOO
from fakes.replays import LINK, on_one_host, over_a_link

from sirtaki.analysis.what_if import unit_cost
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel


def test_without_probes_recorded_sizes_tell_start_up_and_rate() -> None:
    job = on_one_host(cuts=(1, 2, 4))
    slower = replace(
        job,
        iterations=tuple(
            replace(
                each, operations=tuple(replace(one, processor_s=one.processor_s + 0.004) for one in each.operations)
            )
            for each in job.iterations
        ),
    )
    found = unit_cost(slower, GLOO, (0, 1))
    assert (found.startup_s, found.s_per_byte) == (pytest.approx(0.004), pytest.approx(2e-6))
    assert not found.across


def test_a_single_size_tells_a_rate_only() -> None:
    found = unit_cost(on_one_host(cuts=(4,)), GLOO, (0, 1))
    assert (found.startup_s, found.s_per_byte) == (0.0, pytest.approx(2e-6))


def test_recorded_units_say_how_fast_the_link_is_and_probes_how_it_starts() -> None:
    job = over_a_link()
    slower = replace(
        job,
        iterations=tuple(
            replace(each, operations=tuple(replace(one, link_s=2 * one.link_s) for one in each.operations))
            for each in job.iterations
        ),
    )
    found = unit_cost(slower, GLOO, (0, 1))
    assert (found.startup_s, found.host_s) == (LINK.alpha_s, LINK.host_s)
    assert found.s_per_byte == pytest.approx(2e-5)


def test_probes_on_one_host_are_scaled_to_what_was_recorded() -> None:
    probed = LinkModel(alpha_s=0.001, throughput=(1e6,))
    found = unit_cost(replace(on_one_host(), links={GLOO: probed}), GLOO, (0, 1))
    bytes_moved, units = 4 * 6500, 3
    scale = bytes_moved * 2e-6 / (bytes_moved * 1e-6 + units * 0.001)
    assert (found.startup_s, found.s_per_byte) == (pytest.approx(0.001 * scale), pytest.approx(1e-6 * scale))


def test_a_route_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ReplayError, match=r"nothing is known of nccl flat: .*\(known: gloo flat\)"):
        unit_cost(on_one_host(), (TransportKind.NCCL, Algorithm.FLAT), (0, 1))
