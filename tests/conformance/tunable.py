"""Checks of the contract that every tuning target must meet when `TuningController` runs it.

Use: `@pytest.mark.parametrize("check", TUNABLE_CHECKS)` and call `check(make)`. `make` gets the control plane of a rank
and returns a fresh target with two or more settings. Times are simulated: the target runs in a `Played`, which returns
the times that a check determines and forwards all further calls. The ranks are threads of this process. For a target
whose ranks must be processes, each of two processes calls `check(make, run)`; see `RunRanks`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from fakes.meshes import on_planes

from sirtaki.autotune.meta.session import Purpose
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.engine.tuning.controller import TuningController
from sirtaki.errors import PlanError

MakeTarget = Callable[[ControlPlane], Any]
"""Function that creates a target that is ready for a search. Collective."""

RunRanks = Callable[[int, Callable[[ControlPlane], Any]], list[Any]]
"""Runs a function on this number of ranks, each with its control plane. Returns the results of all ranks."""

MOST_ITERATIONS = 1000


class Played:
    """A target with simulated times.

    Attributes:
        ran: applied settings, in order.
        kept: whether `keep` was called.
        reported: whether rank 0 has reported the result.
        measured: settings whose measurement has ended, in order.
    """

    def __init__(self, target: Any, seconds: Callable[[Any], float], *, broken: Callable[[Any], bool]) -> None:
        self._target, self._seconds, self._broken = target, seconds, broken
        self.ran, self.measured = list[Any](), list[Any]()
        self.purposes = list[Purpose]()
        self.kept = self.reported = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def stays(self) -> Any:
        return self._target.stays

    @stays.setter
    def stays(self, setting: Any) -> None:
        self._target.stays = setting

    def apply(self, setting: Any) -> None:
        if self._broken(setting):
            raise PlanError("it is broken")
        self._target.apply(setting)
        self.ran.append(setting)

    def measured_s(self) -> float:
        self.measured.append(self.ran[-1])
        return self._seconds(self.ran[-1])

    def record(self, session: Any, spans_s: Sequence[float]) -> None:
        self.purposes.append(session.assignment.purpose)
        self._target.record(session, spans_s)

    def keep(self) -> None:
        self.kept = True
        self._target.keep()

    def report(self, session: Any) -> None:
        self.reported = True
        self._target.report(session)


def search(
    make: MakeTarget,
    control: ControlPlane,
    seconds: Callable[[Any, Any, int], float],
    *,
    broken: Callable[[Any, Any], bool] = lambda setting, default: False,
) -> tuple[Played, TuningController]:
    """Run a whole search.

    `seconds`: duration of an iteration by setting, default and rank. `broken`: settings that cannot be applied.
    """
    target = make(control)
    default = target.default
    played = Played(
        target, lambda setting: seconds(setting, default, control.rank), broken=lambda setting: broken(setting, default)
    )
    controller: TuningController = getattr(target, "controller", None) or TuningController(control)
    controller.begin(played)
    for _ in range(MOST_ITERATIONS):
        if not controller.tries(played):
            break
        agrees = controller.agrees
        before = len(played.measured)
        controller.iteration_ended()
        assert agrees or len(played.measured) == before  # the target has announced that it needs its peers
    assert not controller.tries(played), "the search does not end"
    return played, controller


def the_default_is_measured_first_and_stays_if_nothing_is_faster(make: MakeTarget, run: RunRanks = on_planes) -> None:
    def on_rank(control: ControlPlane) -> None:
        played, _ = search(make, control, lambda setting, default, rank: 1.0)
        assert played.measured[0] == played.default
        assert len(set(played.ran)) > 1
        assert played.ran[-1] == played.default
        assert played.kept
        assert played.reported == (control.rank == 0)

    run(2, on_rank)


def a_setting_that_is_faster_is_kept(make: MakeTarget, run: RunRanks = on_planes) -> None:
    def on_rank(control: ControlPlane) -> None:
        played, _ = search(make, control, lambda setting, default, rank: 1.0 if setting == default else 0.5)
        assert played.ran[-1] != played.default

    run(2, on_rank)


def ranks_that_measure_different_times_run_the_same_settings(make: MakeTarget, run: RunRanks = on_planes) -> None:
    def on_rank(control: ControlPlane) -> tuple[list[Any], list[Any]]:
        def seconds(setting: Any, default: Any, rank: int) -> float:
            return (1.0 if setting == default else 0.6) * (1.0 + 0.3 * rank)

        played, _ = search(make, control, seconds)
        return played.ran, played.measured

    first, second = run(2, on_rank)
    assert first == second


def one_settings_time_is_the_slowest_or_the_last_ranks(make: MakeTarget, run: RunRanks = on_planes) -> None:
    """On one rank every setting except the default is fast, on the other rank slow."""

    def on_rank(control: ControlPlane) -> tuple[bool, bool]:
        def seconds(setting: Any, default: Any, rank: int) -> float:
            return 1.0 if setting == default else (0.5, 2.0)[rank]

        played, _ = search(make, control, seconds)
        return played.ran[-1] != played.default, played.slowest

    for changed, slowest in run(2, on_rank):
        assert changed is not slowest


def what_cannot_be_run_is_not_kept(make: MakeTarget, run: RunRanks = on_planes) -> None:
    def on_rank(control: ControlPlane) -> None:
        played, controller = search(
            make,
            control,
            lambda setting, default, rank: 1.0 if setting == default else 0.5,
            broken=lambda setting, default: setting != default,
        )
        assert set(played.ran) == {played.default}
        assert played.kept
        assert not controller.failed

    run(2, on_rank)


def an_iteration_that_shows_nothing_on_one_rank_counts_on_none(make: MakeTarget, run: RunRanks = on_planes) -> None:
    def on_rank(control: ControlPlane) -> None:
        number = 0

        def seconds(setting: Any, default: Any, rank: int) -> float:
            nonlocal number
            number += 1
            if number % 2 and rank == 1:
                return math.nan
            return (10.0 if number % 2 else 1.0) if setting == default else 1.0

        played, _ = search(make, control, seconds)
        assert played.ran[-1] == played.default  # it would be slow if these iterations counted

    run(2, on_rank)


def a_fault_on_rank_0_ends_tuning_and_not_training(make: MakeTarget, run: RunRanks = on_planes) -> None:
    def on_rank(control: ControlPlane) -> tuple[Any, bool]:
        def seconds(setting: Any, default: Any, rank: int) -> float:
            return 0.5

        target = make(control)
        played = Played(target, lambda setting: seconds(setting, target.default, control.rank), broken=lambda _: False)

        def fault(*_: Any) -> None:
            raise ZeroDivisionError("a fault")

        played.record = fault  # type: ignore[method-assign]
        controller = getattr(target, "controller", None) or TuningController(control)
        controller.begin(played)
        for _ in range(MOST_ITERATIONS):
            if not controller.tries(played):
                break
            controller.iteration_ended()
        assert played.ran[-1] == played.default
        return played.kept, controller.failed

    with _quiet():
        assert run(2, on_rank) == [(True, True), (True, False)]


class _quiet:
    """Suppress expected warnings."""

    def __enter__(self) -> None:
        logging.disable(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        logging.disable(logging.NOTSET)


TUNABLE_CHECKS = (
    the_default_is_measured_first_and_stays_if_nothing_is_faster,
    a_setting_that_is_faster_is_kept,
    ranks_that_measure_different_times_run_the_same_settings,
    one_settings_time_is_the_slowest_or_the_last_ranks,
    what_cannot_be_run_is_not_kept,
    an_iteration_that_shows_nothing_on_one_rank_counts_on_none,
    a_fault_on_rank_0_ends_tuning_and_not_training,
)
