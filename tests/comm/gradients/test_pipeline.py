"""Gradients are reduced correctly in any order of readiness. Units are launched in their order, and not too early."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.gradients import LonelyRouter, parameters, plan_of

from sirtaki.comm import recorder
from sirtaki.comm.control.members import alone
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import Device
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.flags import FLAG_COUNT, Drift
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.gradients.schedule import IterationPace
from sirtaki.comm.gradients.state import IterationState
from sirtaki.comm.plan import CommPlan, GradientLayout
from sirtaki.comm.transports.contract import NOTHING_TO_DO, Work
from sirtaki.errors import CommError, PlanError, TransportError

RANKS = 3
"""Number of ranks, which all have the same gradients."""


class Streams(Device):
    """A device with streams that counts calls."""

    streams = True

    def __init__(self) -> None:
        self.noticed, self.now, self.users = 0, 0.0, 0
        self.waited_for: list[float] = []

    def notice_stream(self) -> None:
        self.noticed += 1

    def record_event(self, *, timed: bool = False) -> float:
        self.now += 1.0
        return self.now

    def wait_for(self, event: float) -> None:
        self.waited_for.append(event)


class Made:
    """A synchroniser of parameters of these sizes on a rank that is alone, and what becomes of its gradients."""

    def __init__(
        self,
        *sizes: int,
        cuts: Sequence[int] = (),
        streams: int = 1,
        device: Device | None = None,
        dtypes: Sequence[torch.dtype] = (),
        order: Sequence[int] | None = None,
        unused_as_none: bool = False,
        reduction: Reduction | None = None,
    ) -> None:
        each = dtypes or (torch.float32,) * len(sizes)
        self.params = [parameters((size,), dtype=dtype)[0] for size, dtype in zip(sizes, each, strict=True)]
        self.router = LonelyRouter(device, ranks=RANKS)
        self.cuts, self.streams = cuts, streams
        self.sync = GradientPipeline(
            self.params,
            [f"p{index}" for index in range(len(sizes))],
            control=ControlPlane(alone()),
            router=self.router,  # type: ignore[arg-type]  # what is needed of one
            reduction=reduction or Reduction(),
            default_plan=self.plan,
            unused_as_none=unused_as_none,
        )
        self.order = range(len(sizes)) if order is None else order

    def plan(self, layout: GradientLayout) -> CommPlan:
        return plan_of(layout.numel, *self.cuts, streams=self.streams)

    def profiled(self) -> "Made":
        """Return the pipeline after its order was profiled."""
        for _ in range(2):
            self.come(*self.order)
            self.sync.finish()
        assert not self.sync.profiling
        self.router.reduced.clear()
        return self

    def come(self, *indices: int) -> None:
        """Mark gradients of ascending values as ready."""
        for index in indices:
            gradient = parameters((self.params[index].numel(),), dtype=self.params[index].dtype)[0].grad
            assert gradient is not None
            self.params[index].grad = gradient
            self.sync.ready(index, gradient, gradient._version)

    @property
    def left(self) -> list[tuple[int, int]]:
        """Return the element ranges of launched units, in order."""
        return [(start, stop) for start, stop, _ in self.router.reduced]

    @property
    def grads(self) -> list[list[float] | None]:
        return [None if param.grad is None else param.grad.tolist() for param in self.params]


# ── where it failed ──────────────────────────────────────────────────────────────────────────────────────────────


class Broken(Work):
    def wait(self, timeout_s: float) -> bool:
        raise CommError("a cable is out")


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("at", ["leaving", "under way"])
def test_an_error_reports_once_the_iteration_and_the_gradients(profiled: bool, at: str) -> None:
    made = Made(2, 3, 1, cuts=(2, 5))
    if profiled:
        made.profiled()
    reduce = made.router.all_reduce

    def fail(buffer: Any, start: int, stop: int, **how: Any) -> Work:
        if profiled and start != 2:
            return reduce(buffer, start, stop, **how)
        if at == "leaving":
            raise ZeroDivisionError("no such stream")
        return Broken()

    made.router.all_reduce = fail  # type: ignore[method-assign]

    def iterate() -> None:
        made.come(0, 1, 2)
        made.sync.finish()

    with pytest.raises(CommError) as caught:
        iterate()
    said = str(caught.value)
    assert said.count(f"rank 0, iteration {2 if profiled else 0}, ") == 1, said
    assert ("unit 2 of 3 (p1) on stream 0" if profiled else "a unit (p2 … ") in said
    assert isinstance(caught.value.__cause__, ZeroDivisionError) == (at == "leaving")


# ── when units leave ─────────────────────────────────────────────────────────────────────────────────────────────


def test_units_leave_once_their_gradients_and_all_units_before_them_are_complete() -> None:
    made = Made(2, 3, 1, cuts=(2, 5)).profiled()
    made.come(1)
    assert made.left == []  # complete, but not its turn
    assert made.sync.missing == [0, 2]
    assert not made.sync.can_reduce
    made.come(0)
    assert made.left == [(0, 2), (2, 5)]
    made.come(2)
    assert made.left == [(0, 2), (2, 5), (5, 6 + FLAG_COUNT)]
    assert made.sync.can_reduce
    assert made.sync.reduce(None)
    assert made.grads == [[0, 3], [0, 3, 6], [0]]
    assert made.sync.state is IterationState.REDUCED
    assert not made.sync.can_reduce
    assert len(made.left) == 3
    made.sync.finish()
    assert not made.sync.pending


def test_gradients_in_the_expected_order_call_back_where_units_may_launch_and_survive_others() -> None:
    made = Made(2, 3, 1, cuts=(2, 5)).profiled()
    for param in made.params:
        param.grad = torch.ones_like(param)
    assert made.sync.begin_pass() == {1, 2, 3}
    assert made.sync.ready_in_order(made.params[:1])
    assert made.left == [(0, 2)]
    assert not made.sync.ready_in_order(made.params[2:])
    made.come(2, 1)
    assert made.left == [(0, 2), (2, 5), (5, 6 + FLAG_COUNT)]


def test_gradients_are_copied_in_together_when_their_unit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    made, copied = Made(1, 1, 1, 1, cuts=(1, 3)).profiled(), list[int]()
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda into, out: copied.append(len(into)) or copy(into, out))
    made.come(1, 3, 0, 2)
    assert copied == [3, 1]


@pytest.mark.parametrize("seed", range(60))
def test_every_element_is_launched_once_with_its_gradient_in_every_order(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(0, 7) for _ in range(rng.randrange(1, 9))]
    dtypes = [rng.choice([torch.float32, torch.float64]) if seed % 3 == 0 else torch.float32 for _ in sizes]
    made = Made(
        *sizes,
        cuts=sorted(rng.sample(range(1, 40), rng.randrange(0, 5))),
        streams=rng.randrange(1, 4),
        dtypes=dtypes,
        order=rng.sample(range(len(sizes)), len(sizes)),
        device=Streams() if seed % 4 == 1 else None,
        unused_as_none=seed % 5 == 2,
        reduction=Reduction(prescale=0.5, postscale=rng.choice([1.0, 4.0])) if seed % 7 == 3 else None,
    )
    factor = RANKS * made.sync._reduction.prescale * made.sync._reduction.postscale
    if seed % 2:
        made.profiled()
    if seed % 6 == 5:
        pace = IterationPace(
            needed=[rng.random() for _ in sizes], ready_s=[rng.random() for _ in sizes], backward_s=1.0, s_per_byte=0.1
        )
        made.sync.reorder_units(pace)
    for iteration in range(3):
        if seed % 4 == 3 and iteration:
            cuts = sorted(rng.sample(range(1, 40), rng.randrange(0, 5)))
            made.sync.use([plan_of(layout.numel, *cuts, streams=iteration) for layout in made.sync.layouts])
        for param in made.params:
            param.grad = None
        made.router.reduced.clear()
        arrival = rng.sample(range(len(sizes)), rng.randrange(len(sizes) + 1))
        made.come(*arrival)
        if made.sync.can_reduce and rng.random() < 0.5:
            made.sync.reduce(None)
        made.sync.finish()
        for index, size in enumerate(sizes):
            came = index in arrival
            wanted = [factor * value if came else 0.0 for value in range(size)]
            grad = made.params[index].grad
            if made.sync._unused_as_none and not came:
                assert grad is None
            else:
                assert grad is not None
                assert grad.tolist() == wanted
        elements = sum(layout.numel for layout in made.sync.layouts)
        assert sum(stop - start for start, stop in made.left) == elements
        if seed % 2 and len(made.sync.layouts) == 1:
            assert sorted(made.left) == [(unit.start, unit.stop) for unit in made.sync.plans[0].units]


def test_a_unit_with_late_gradients_delays_only_its_own_stream() -> None:
    made = Made(4, 4, 4, 4, cuts=(4, 8, 12), streams=2).profiled()
    made.come(1, 3)
    assert made.left == []
    made.come(0, 2)
    made.sync.finish()
    made.router.reduced.clear()
    made.sync.reorder_units(
        IterationPace(needed=[0.0, 1.0, 2.0, 3.0], ready_s=[0.0] * 4, backward_s=0.0, s_per_byte=1e-9)
    )
    made.come(1)
    assert made.left == [(4, 8)]
    made.come(0, 2, 3)
    assert (12, 16 + FLAG_COUNT) not in made.left, "flags are known when the pass has ended"
    made.sync.flush()
    made.sync.flush()
    assert sorted(made.left) == [(0, 4), (4, 8), (8, 12), (12, 16 + FLAG_COUNT)]


def test_gradients_are_awaited_and_assigned_one_by_one() -> None:
    made = Made(4, 4, 2, cuts=(6,)).profiled()
    assert made.sync.can_defer
    awaited, wait = list[int](), made.router.wait_for

    def wait_for(works: Sequence[Any], **how: Any) -> bool:
        awaited.append(len(works))
        return wait(works, **how)

    made.router.wait_for = wait_for  # type: ignore[method-assign]
    made.come(0, 1, 2)
    made.sync.flush()
    assert made.sync.wait_for_one(1, lambda: True) == []
    assert made.sync.wait_for_one(0, None) == [0]
    made.sync.assign_gradients([0])
    grad = made.params[0].grad
    assert grad is not None
    grad.zero_()  # which holds
    assert made.sync.wait_for_one(1, None) == [0, 1, 2]  # it lies in both units
    assert awaited == [2, 1, 2]
    assert made.sync.reduce(None)
    assert made.grads[:2] == [[0] * 4, [0, 3, 6, 9]]
    assert not made.sync.problem
    assert made.sync.finish().span_s >= 0.0


def test_an_interrupted_wait_continues_and_sends_nothing_twice_and_a_failed_one_raises() -> None:
    made = Made(2).profiled()
    made.come(0)
    assert [made.sync.reduce(lambda: True) for _ in range(2)] == [False, False]
    assert made.sync.reduce(lambda: False)
    assert len(made.left) == 1
    made.sync.finish()

    def fail(works: Sequence[Any], **how: Any) -> bool:
        raise CommError("rank 1 has ended")

    made.come(0)
    made.router.wait_for = fail  # type: ignore[method-assign]
    with pytest.raises(CommError, match="rank 1"):
        made.sync.finish()


# ── what was put in, and what was done too early ─────────────────────────────────────────────────────────────────


def test_a_missing_gradient_counts_as_it_is_or_as_zeros_and_a_frozen_parameter_is_ignored() -> None:
    made = Made(2, 2, 2).profiled()
    made.params[0].grad, made.params[1].grad = torch.tensor([4.0, 5.0]), None
    made.params[2].grad = torch.tensor([6.0, 7.0])
    made.params[2].requires_grad_(requires_grad=False)
    made.sync.finish()
    assert made.grads == [[12.0, 15.0], [0.0, 0.0], [6.0, 7.0]]


def test_a_rank_that_has_joined_gives_zeros() -> None:
    made = Made(2, 2).profiled()
    made.sync.vote_drift(Drift.SLOWER)
    made.sync.contribute_zeros()
    assert made.left == [(0, 4 + FLAG_COUNT)]
    made.sync.finish(joined=True)
    assert made.grads == [[0, 0], [0, 0]]
    assert made.sync.drift is Drift.USUAL


@pytest.mark.parametrize("came", [[0, 1], [0]])
def test_a_gradient_that_is_written_before_it_is_reduced_is_a_problem_of_its_iteration(came: list[int]) -> None:
    made = Made(2, 2).profiled()
    made.come(*came)
    made.params[0].grad.mul_(2.0)  # type: ignore[union-attr]
    made.sync.finish()
    assert "the gradient of p0 was written" in made.sync.problem
    made.come(0, 1)
    made.sync.finish()
    assert not made.sync.problem


# ── devices with streams, several threads, recorders ─────────────────────────────────────────────────────────────


def test_with_streams_units_leave_from_the_hook_unless_the_order_is_profiled_or_several_share_the_device() -> None:
    device = Streams()
    made = Made(2, 3, cuts=(2,), device=device)
    made.come(0, 1)
    assert made.left == []
    assert made.sync.can_reduce
    made.sync.finish()
    made.profiled()
    device.noticed = 0
    made.come(0)
    assert made.left == [(0, 2)]
    made.come(1)
    assert len(made.left) == 2
    made.sync.finish()
    made.router.reduced.clear()
    device.users = 2
    made.come(0)
    device.users = 1  # the other one goes meanwhile
    made.come(1)
    assert made.left == []
    made.sync.finish()
    assert len(made.left) == 2


def test_with_streams_a_report_is_of_the_iteration_before_for_which_alone_it_waits() -> None:
    device = Streams()
    made = Made(2, device=device)
    reports, reduced = [], []
    for _ in range(4):
        made.come(0)
        made.sync.reduce(None)
        reduced.append(made.sync._reduced)
        reports.append(made.sync.finish())
    assert device.waited_for[:2] == reduced[:2], "while the order is profiled, the times are needed at once"
    assert set(reduced[2:3]) <= set(device.waited_for)
    assert reduced[3] not in device.waited_for
    assert made.sync.in_flight.units
    assert [len(report.ready_s) for report in reports] == [1, 1, 0, 0]


def test_a_recorder_gets_when_each_gradient_was_ready_copied_and_launched() -> None:
    told: list[recorder.TracedIteration] = []
    made = Made(3, 4, cuts=(3,)).profiled()
    recorder.start(SimpleNamespace(iteration=told.append))  # type: ignore[arg-type]
    try:
        made.sync._begin_iteration()
        assert not made.sync.can_defer
        made.come(1, 0)
        made.sync.finish()
    finally:
        recorder.stop()
    (traced,) = told
    assert [(moment.layout, moment.place) for moment in traced.ready] == [(0, 1), (0, 0)]
    assert [copy.n_gradients for copy in traced.copies] == [2]
    assert [(unit.start, unit.stop) for unit in traced.units] == [(0, 3), (3, 7 + FLAG_COUNT)]
    assert traced.first_ready_s <= traced.ready[-1].ready_s <= traced.units[0].issued_s <= traced.end_s


# ── while the order is profiled ──────────────────────────────────────────────────────────────────────────────────


def agreed(made: Made, *rounds: list[int]) -> None:
    """Let the ranks agree on these positions of the layout, round by round."""
    made.sync._negotiation = negotiation = SimpleNamespace(  # type: ignore[assignment]
        begin=lambda sizes_bytes, granularity_bytes, on_agreed: vars(negotiation).update(
            sizes_bytes=sizes_bytes.tolist(), granularity_bytes=granularity_bytes, agree=on_agreed
        ),
        set_ready=lambda position: None,
        end=lambda: [negotiation.agree(places) for places in rounds],
        wait=lambda interrupted: True,
        close=lambda: True,
    )


def test_gradients_ready_on_all_ranks_are_launched_with_neighbours_and_the_flags_last() -> None:
    made = Made(2, 0, 1, 4)  # in the layout the other way round
    agreed(made, [0, 1], [2], [3])
    made.come(0, 1, 2, 3)
    made.sync.finish()
    assert made.left == [(0, 5), (5, 7), (7, 7 + FLAG_COUNT)]
    assert vars(made.sync._negotiation)["sizes_bytes"] == [16, 4, 0, 8]
    assert made.grads == [[0, 3], [], [0], [0, 3, 6, 9]]


def test_neighbours_join_up_to_the_largest_unit_of_the_plan_on_its_streams_in_turn() -> None:
    made = Made(2, 7, 2, 2, cuts=(5, 9, 13, 16), streams=2)  # the largest unit has 5 elements
    agreed(made, [0, 1, 2, 3])
    made.come(0, 1, 2, 3)
    made.sync.finish()
    assert vars(made.sync._negotiation)["granularity_bytes"] == 5 * 4
    # The flags, at the end, go as they are.
    assert made.left == [(0, 4), (4, 9), (9, 11), (11, 13), (13, 13 + FLAG_COUNT)]
    assert [how["stream"] for _, _, how in made.router.reduced] == [0, 1, 0, 1, 0]


def test_a_reprofile_is_begun_in_the_next_iteration_but_one_and_gradients_move_to_the_new_buffers() -> None:
    made = Made(2, 3, 1).profiled()
    made.sync.profile_again()
    again = list[bool]()
    for _ in range(6):
        made.come(2, 0, 1)
        made.sync.finish()
        again.append(made.sync.profiling)
        buffers = made.sync._buffers
        assert made.grads == [[0, 3], [0, 3, 6], [0]]
        assert all(param.grad is view for param, view in zip(buffers.params, buffers.views, strict=True))
    assert again == [False, True, True, False, False, False]
    assert made.sync.layouts[0].names[:3] == ("p2", "p0", "p1")
    assert made.sync.in_layout_order([0.0, 1.0, 2.0]) == [2.0, 0.0, 1.0]


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("plans", "what"),
    [
        ([], "plans: expected 1 .* found 0"),
        ([plan_of(6 + FLAG_COUNT)] * 2, "plans: expected 1 .* found 2"),
        ([plan_of(6)], f"is for 6 gradient elements, but this model has {6 + FLAG_COUNT}"),
        ([plan_of(6 + FLAG_COUNT, 1)], "no descriptors"),
    ],
)
def test_plans_that_are_refused_leave_the_old_ones(plans: list[CommPlan], what: str) -> None:
    made = Made(6, cuts=(3,)).profiled()
    before = made.sync.plans
    opened: Callable[[CommPlan], None] = made.router.open_plan

    def fail(plan: CommPlan) -> None:
        raise TransportError("no descriptors")

    made.router.open_plan = fail  # type: ignore[method-assign]
    with pytest.raises((PlanError, TransportError), match=what):
        made.sync.use(plans)
    made.router.open_plan = opened  # type: ignore[method-assign]
    assert made.sync.plans == before
    made.come(0)
    with pytest.raises(PlanError, match="while gradients are computed"):
        made.sync.use([plan_of(6 + FLAG_COUNT)])
    assert made.left == [(0, 3), (3, 6 + FLAG_COUNT)]


def test_the_end_of_a_unit_is_the_last_one_if_all_works_report_ends() -> None:
    made = Made(2).profiled()
    made.come(0)
    made.sync.flush()
    made.sync.wait_for_one(0, None)
    assert made.sync._launched.works == [NOTHING_TO_DO]
    made.sync._launched.works = [SimpleNamespace(times=lambda: (None, 1e12), wait=lambda timeout_s: True)]  # type: ignore[list-item]
    made.sync.reduce(None)
    assert made.sync._reduced == 1e12


def test_residuals_of_a_compressing_job_are_applied_once_by_one_that_does_not_compress() -> None:
    reduction = Reduction()
    made = Made(2, 3, reduction=reduction).profiled()
    reduction.feedback.load_state_dict({"owed": {"p1": torch.tensor([1.0, 2.0, 4.0])}, "factors": {}})
    seen = []
    for _ in range(4):
        made.come(0, 1)
        made.sync.finish()
        seen.append(made.grads)
    plain = seen[-1]
    assert plain[1] is not None
    paid = [plain[0], [value + RANKS * owed for value, owed in zip(plain[1], (1.0, 2.0, 4.0), strict=True)]]
    assert seen.count(paid) == 1
    assert seen.count(plain) == 3
    assert not reduction.feedback.residuals
