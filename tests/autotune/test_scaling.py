import json
from dataclasses import replace
from itertools import groupby

import pytest

from bench.lib.workloads import cluster, workload
from sirtaki.autotune.arms.planners import OUR_PLANNERS, LibraM
from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.scaling import DEFAULT, scaling_table
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.errors import TuningError

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
SPACE = KnobSpace(routes=(ROUTE,), streams=(1, 2, 3, 4))
UNTUNED = Knobs(unit_bytes=25 * MIB, streams=1, transport=TransportKind.GLOO)
NETWORK = workload("resnet50")
DESCRIBED = cluster("10 Gbit/s TCP", 8)


def table(**changes):
    arguments = {
        "layout": NETWORK.layout,
        "profile": NETWORK.profile(),
        "link_at": lambda n: replace(DESCRIBED, ranks=n).link(),
        "ranks": (2, 16, 64),
        "space": SPACE,
        "default": UNTUNED,
    }
    return scaling_table(**{**arguments, **changes})


def test_every_number_of_ranks_has_the_default_and_every_planner_the_best_first():
    rows = table()
    for _, group in groupby(rows, key=lambda row: row.ranks):
        members = list(group)
        times = [row.iteration_s for row in members]
        assert times == sorted(times)
        assert {row.planner for row in members} == {
            DEFAULT,
            *(kind.name for kind in OUR_PLANNERS if kind is not LibraM),
        }


def test_efficiency_falls_with_the_ranks_and_planning_beats_the_default_on_capped_flows():
    rows = table()
    best = [next(row for row in rows if row.ranks == n).efficiency for n in (2, 16, 64)]
    default = [next(row for row in rows if row.ranks == n and row.planner == DEFAULT).efficiency for n in (2, 16, 64)]
    assert best == sorted(best, reverse=True)
    assert all(mine > untuned for mine, untuned in zip(best, default, strict=True))
    assert 0 < min(default) < max(best) <= 1


@pytest.mark.lengthy
def test_a_measured_link_is_corrected_to_other_sizes():
    measured = DESCRIBED.link()
    corrected = table(link_at=lambda n: measured.rescaled(from_ranks=8, to_ranks=n))
    assert [row.iteration_s for row in corrected] == pytest.approx([row.iteration_s for row in table()])


def test_contention_is_corrected_with_the_ring():
    rate = RateCurve(gamma_1=1e9, gamma_2=5e8, gamma_3=0.05)
    contention = ContentionModel(alpha_1=1.0, alpha_2=1e-4, overlapped=rate, alone=rate)
    few, many = (table(contention=contention, contention_ranks=8, ranks=(n,))[0] for n in (2, 64))
    assert few.iteration_s < many.iteration_s


def test_rows_are_ready_for_json():
    assert json.loads(json.dumps([row.to_json() for row in table(ranks=(4,))]))[0]["ranks"] == 4


@pytest.mark.parametrize("ranks", [(), (1, 2)])
def test_numbers_of_ranks_that_cannot_be_are_refused(ranks):
    with pytest.raises(TuningError, match="at least 2"):
        table(ranks=ranks)


def test_one_gradient_and_no_compute_time_scale_too():
    rows = table(layout=GradientLayout(sizes=(1,)), profile=Profile(ready_s=(0.0,), compute_s=0.0), ranks=(2,))
    assert all(row.iteration_s > 0 for row in rows)
