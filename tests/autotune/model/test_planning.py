import json
from dataclasses import replace

import pytest

from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel

GLOO = (TransportKind.GLOO, Algorithm.FLAT)
TREE = (TransportKind.GLOO, Algorithm.HIERARCHICAL)
RATE = RateCurve(gamma_1=1e9, gamma_2=5e8, gamma_3=0.05)
MODEL = PlanningModel(
    layout=GradientLayout(sizes=(10, 20), names=("b", "a")),
    profile=Profile.from_durations([0.1, 0.2], forward_s=0.1),
    links={
        GLOO: LinkModel(alpha_s=1e-3, throughput=(1e8, 2e8), residual=0.02),
        TREE: LinkModel(alpha_s=0, throughput=(1,)),
    },
    contention=ContentionModel(alpha_1=1.0, alpha_2=1e-4, overlapped=RATE, alone=RATE),
)


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, contention=None)])
def test_json_keeps_the_model(model):
    assert PlanningModel.from_json(json.loads(json.dumps(model.to_json()))) == model


@pytest.mark.parametrize(
    "damage",
    [
        {"layout": {}},
        {"profile": None},
        {"links": [{"transport": "carrier pigeon", "algorithm": "flat", "link": {}}]},
        {"links": []},
        {"contention": {"alpha_1": 1.0}},
    ],
)
def test_what_is_no_saved_model_is_refused(damage):
    with pytest.raises(TuningError):
        PlanningModel.from_json({**MODEL.to_json(), **damage})


def test_no_span_is_below_the_bound_of_backward_pass_and_best_rate():
    assert MODEL.bound_s == pytest.approx(0.2)  # from the first ready gradient to the last
    big = replace(MODEL, layout=GradientLayout(sizes=(10_000_000, 20_000_000)))
    assert big.bound_s == pytest.approx(120e6 / 2e8)  # two streams over GLOO


def test_a_model_is_another_where_layout_routes_contention_or_ready_times_are():
    assert not MODEL.differs_from(replace(MODEL, profile=Profile.from_durations([0.11, 0.2])))
    assert MODEL.differs_from(replace(MODEL, profile=Profile.from_durations([0.2, 0.2])))
    assert MODEL.differs_from(replace(MODEL, layout=GradientLayout(sizes=(10, 21))))
    assert MODEL.differs_from(replace(MODEL, links={GLOO: MODEL.links[GLOO]}))
    assert MODEL.differs_from(replace(MODEL, contention=None))
