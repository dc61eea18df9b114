"""Reduces gradients that come in every kind of order. Started by test_synchroniser.py."""

import random
import sys

import pytest
import torch

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.iteration import IterationReport
from sirtaki.comm.gradients.synchroniser import Synchroniser
from sirtaki.comm.plan import CommPlan, GradientLayout
from sirtaki.comm.router import Router
from sirtaki.engine.ranks import open_ranks
from sirtaki.errors import MismatchError, PlanError
from sirtaki.settings import Settings

control = ControlPlane(open_ranks(Settings.from_environ()))
rank, size = control.rank, control.size
ITERATIONS = int(sys.argv[1])


def parameters(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in zip(shapes, dtypes, strict=True)]


def gradient(param: torch.Tensor, index: int, iteration: int, of_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(iteration * 10_000 + index * 100 + of_rank)
    return torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


def mean_gradient(param: torch.Tensor, index: int, iteration: int, absent: dict[int, set[int]]) -> torch.Tensor:
    parts = [
        gradient(param, index, iteration, other).double()
        if index not in absent.get(other, ())
        else torch.zeros(param.shape, dtype=torch.float64)
        for other in range(size)
    ]
    return torch.stack(parts).sum(0) / size


def grad_of(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def default_plan(layout: GradientLayout) -> CommPlan:
    transport, algorithm = router.routes[0]
    return Knobs(unit_bytes=2000, streams=2, transport=transport, algorithm=algorithm).to_plan(layout)


def run_iteration(
    sync: Synchroniser, params: list[torch.Tensor], order: list[int], *, absent: dict[int, set[int]] | None = None
) -> IterationReport:
    """One iteration in this rank's order, checked against the plain mean."""
    absent = absent or {}
    iteration = sync.iteration
    for param in params:
        param.grad = None
    for index in order:
        if index not in absent.get(rank, ()):
            params[index].grad = gradient(params[index], index, iteration, rank)
            sync.ready(index, grad_of(params[index]), grad_of(params[index])._version)
    report = sync.finish()
    for index, param in enumerate(params):
        wanted = mean_gradient(param, index, iteration, absent)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[param.dtype]
        assert param.grad is not None
        assert param.grad.shape == param.shape
        torch.testing.assert_close(param.grad.double(), wanted, rtol=tolerance, atol=tolerance)
    return report


SHAPES = [(30, 20), (20,), (1,), (0,), (7, 3, 5), (2500,), (), (64, 64), (3,), (999,)]
DTYPES = [torch.float32] * len(SHAPES)
MIXED = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64] * 2

for dtypes in (DTYPES, MIXED):
    router = Router(control, timeout_s=30.0)
    params = parameters(SHAPES, dtypes)
    sync = Synchroniser(
        params,
        [f"p{index}" for index in range(len(params))],
        control=control,
        router=router,
        reduction=Reduction(postscale=1.0 / size),
        default_plan=default_plan,
    )
    fixed = list(range(len(params)))[::-1]
    random.Random(5).shuffle(fixed)

    # Learning: after it the layout is in the order in which gradients came, whatever the parameters' order.
    reports = [run_iteration(sync, params, fixed) for _ in range(3)]
    assert [report.profiled for report in reports] == [False, True, False]
    assert reports[0].ready_s
    assert not reports[2].ready_s
    if dtypes is DTYPES:
        assert sync.layouts[0].names == (*(f"p{index}" for index in fixed), "sirtaki.control_flags")

    # Scheduled: any order, also another one on each rank, with absent gradients anywhere.
    shared = random.Random(17)
    for _ in range(ITERATIONS):
        own = fixed.copy()
        random.Random(rank * 1000 + sync.iteration).shuffle(own)
        absent = {other: {index for index in range(len(params)) if shared.random() < 0.1} for other in range(size)}
        run_iteration(sync, params, own, absent=absent)

    # A new plan between iterations changes nothing but the plan.
    for streams, unit_bytes in ((1, 100_000), (3, 64), (2, 4096)):
        transport, algorithm = router.routes[shared.randrange(len(router.routes))]
        knobs = Knobs(unit_bytes=unit_bytes, streams=streams, transport=transport, algorithm=algorithm)
        sync.set_plans([knobs.to_plan(layout) for layout in sync.layouts])
        for _ in range(3):
            run_iteration(sync, params, fixed)
    # The order may be profiled again under a plan that has fewer units than streams: the others are not open.
    few = Knobs(unit_bytes=1 << 30, streams=4, transport=router.routes[0][0], algorithm=router.routes[0][1])
    sync.set_plans([few.to_plan(layout) for layout in sync.layouts])
    sync.profile_again()
    assert any(run_iteration(sync, params, fixed).profiled for _ in range(6))
    numel = sync.layouts[0].numel
    cut = Knobs(
        unit_bytes=4096, streams=2, transport=router.routes[0][0], cuts=(Cut(stop=5), Cut(stop=numel, stream=1))
    )
    sync.set_plans([cut.to_plan(sync.layouts[0]), *(default_plan(layout) for layout in sync.layouts[1:])])
    run_iteration(sync, params, fixed)

    # Plans that differ between ranks are refused on all of them, and the old ones go on.
    if size > 1:
        odd = Knobs(unit_bytes=1000 + 64 * rank, streams=1, transport=router.routes[0][0])
        with pytest.raises(MismatchError, match="the plan"):
            sync.set_plans([odd.to_plan(layout) for layout in sync.layouts])
        run_iteration(sync, params, fixed)

    # Not in the middle of an iteration, and not with a plan for other gradients.
    params[0].grad = gradient(params[0], 0, sync.iteration, rank)
    sync.ready(0, grad_of(params[0]), grad_of(params[0])._version)
    assert sync.pending
    with pytest.raises(PlanError, match="between iterations"):
        sync.set_plans([default_plan(layout) for layout in sync.layouts])
    assert "p1" in sync.missing_names()
    assert "p0" not in sync.missing_names()
    sync.finish()
    sync.close()
    router.close()

# Gradients that stay views of the flat buffer are not copied, and keep their values while the order is learned anew.
router = Router(control, timeout_s=30.0)
params = parameters([(50,)] * 40, [torch.float32] * 40)
sync = Synchroniser(
    params,
    [f"q{index}" for index in range(40)],
    control=control,
    router=router,
    reduction=Reduction(postscale=1.0 / size),
    default_plan=default_plan,
)
forwards, backwards = list(range(40)), list(range(40))[::-1]
for _ in range(3):
    run_iteration(sync, params, forwards)
assert sync.layouts[0].names[:2] == ("q0", "q1")
relearned_at = None
for _ in range(400):
    if run_iteration(sync, params, backwards).profiled:
        relearned_at = sync.iteration
        break
assert relearned_at is not None, "nobody noticed that gradients come in another order"
assert sync.layouts[0].names[:2] == ("q39", "q38")
addresses = [param.grad.data_ptr() for param in params if param.grad is not None]
run_iteration(sync, params, backwards)
assert addresses == [param.grad.data_ptr() for param in params if param.grad is not None]
sync.close()
router.close()

# Travelling in another dtype: the gradients come back in their own.
router = Router(control, timeout_s=30.0)
params = parameters([(100,), (7,)], [torch.float32] * 2)
sync = Synchroniser(
    params,
    ["a", "b"],
    control=control,
    router=router,
    reduction=Reduction(prescale=0.5, postscale=2.0 / size, wire_dtype=((torch.float32, torch.float16),)),
    default_plan=default_plan,
)
for _ in range(5):
    for index, param in enumerate(params):
        param.grad = gradient(param, index, sync.iteration, rank)
        sync.ready(index, grad_of(params[index]), grad_of(params[index])._version)
    iteration = sync.iteration
    sync.finish()
    for index, param in enumerate(params):
        assert param.grad is not None
        assert param.grad.dtype == torch.float32
        wanted = mean_gradient(param, index, iteration, {}).float()
        torch.testing.assert_close(param.grad, wanted, rtol=1e-2, atol=1e-2)
sync.close()
router.close()
control.close()
print(f"ok {rank}")
