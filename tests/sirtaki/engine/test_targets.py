"""All tuning targets meet the controller's contract, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conformance.tunable import TUNABLE_CHECKS, MakeTarget
from fakes.meshes import on_planes

from sirtaki.autotune.arms.techniques import GridArm
from sirtaki.autotune.knobs import KIB, Knobs, KnobSpace
from sirtaki.autotune.sparse import LEARNING_ITERATIONS, AccessSample, CollectiveCosts, VolumeModel
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.sparse.worker import RowFormat
from sirtaki.engine.rows_target import RowsTarget
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.engine.tuning.overlap import PREPARING, ForwardOverlap
from sirtaki.engine.tuning.pipeline_target import PipelineTarget
from sirtaki.engine.tuning.plans import CarriedTuning

REPORT = IterationReport(span_s=1.0, backward_s=1.0)
SPACE = KnobSpace(
    routes=((TransportKind.SHARED_MEMORY, Algorithm.FLAT),), unit_bytes=(64 * KIB, 1024 * KIB), streams=(1, 2)
)


def rows(control: ControlPlane) -> RowsTarget:
    form = RowFormat(1000, 16, torch.float32)
    target = RowsTarget("table", form, control, fixed=None, tries=True)
    for _ in range(LEARNING_ITERATIONS):
        target.count_accesses(AccessSample(120, 0, 40, [np.arange(30)] * 4))
    pace = CollectiveCosts(
        exchange_s=1e-4, exchange_bytes_per_s=1e7, reduce_s=1e-4, reduce_bytes_per_s=7e6, add_bytes_per_s=1e9
    )
    assert target.choose(VolumeModel(form, 4, target.learned, pace))
    return target


def pipeline(control: ControlPlane, carried: CarriedTuning | None = None) -> PipelineTarget:
    """Return a pipeline whose order was profiled, tuned by grid search."""
    settings = Settings(registry=REGISTRY_OFF, transport=TransportKind.SHARED_MEMORY, warmup_iterations=60)
    params = [torch.nn.Parameter(torch.zeros(64 * KIB)) for _ in range(4)]
    names = [f"p{number}" for number in range(len(params))]
    target = PipelineTarget(
        control, settings, params, names, reduction=Reduction(), arms=[GridArm(SPACE)], carried=carried
    )
    target._profiled = IterationReport(span_s=1.0, backward_s=1.0, ready_s=(0.0,) * len(params), profiled=True)
    return target


def overlap(control: ControlPlane) -> ForwardOverlap:
    """Deferred updates that have been prepared for."""
    of = pipeline(control)
    target = ForwardOverlap(control, of, tries=False)
    for _ in range(PREPARING):
        target.iteration_ended(
            IterationReport(span_s=1.0, backward_s=1.0), of.synchroniser, profiled=None, joined=False
        )
    target.controller = of.controller  # type: ignore[attr-defined]
    return target


@pytest.mark.parametrize("make", [pipeline, overlap, rows])
@pytest.mark.parametrize("check", TUNABLE_CHECKS)
def test_a_target_meets_the_controllers_contract(check: Callable[[MakeTarget], None], make: Any) -> None:
    check(make)


def trained(target: PipelineTarget, iterations: int) -> list[Knobs]:
    """Train with a pipeline that is the faster, the more streams it uses. Return the settings that ran."""
    ran, apply = list[Knobs](), target.apply

    def noted(knobs: Knobs) -> None:
        apply(knobs)
        ran.append(knobs)

    target.apply = noted  # type: ignore[method-assign]
    target.measured_s = lambda: 1.0 / target.knobs.streams  # type: ignore[method-assign]
    target.refine_until = 1000
    target.controller.begin(target)
    for _ in range(iterations):
        if target.controller.searching:
            target.controller.iteration_ended()
        else:
            target.controller.refine(target)
    return ran


def test_an_elastic_job_refines_its_setting_after_a_restart_with_the_trials_before_it() -> None:
    def on_rank(control: ControlPlane) -> tuple[list[Knobs], list[Knobs], int]:
        carried = CarriedTuning()
        first, second = (pipeline(control, carried) for _ in range(2))
        before = trained(first, 200)
        carried.going_on = True
        first.close()
        (left,) = carried.of(first._key)
        return before, trained(second, 200), len(left.trials)

    (before, after, n_trials), (*others, _) = on_planes(2, on_rank)
    assert others == [before, after]
    assert n_trials > 2
    assert after[0] == before[-1]
    assert len(after) > 1
