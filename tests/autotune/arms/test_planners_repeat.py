"""The same job gets the same plans in every process: no order of sets, no addresses."""

import os
import subprocess
import sys

PROGRAM = """
import json
from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import KIB, MIB, KnobSpace
from sirtaki.measures import LinkModel
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout
from sirtaki.comm.plan import Algorithm, TransportKind

route = (TransportKind.GLOO, Algorithm.FLAT)
space = KnobSpace(routes=(route,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2, 3, 4, 6, 8, 12))
link = LinkModel(alpha_s=1e-3, throughput=(1e9,) * 8)  # streams gain nothing, so that many plans take as long
for first in range(4):
    layout = GradientLayout(sizes=tuple(10_000 + 37_000 * ((first + 7 * index) % 11) for index in range(12)))
    profile = Profile.from_durations([1e-3] * 12)
    model = PlanningModel(layout=layout, profile=profile, links={route: link})
    for planner in make_planners(space=space, model=model):
        print(planner.name, json.dumps([proposal.knobs.to_json() for proposal in planner.ask(3)]))
"""


def plans_under(hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True, timeout=100
    ).stdout


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    first, second = plans_under("1"), plans_under("2")
    assert first.count("asc_wfbp_n") == 4
    assert first == second
