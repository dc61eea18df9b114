"""The worker reduces in one order, whatever comes first, and nobody waits for what has failed."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes, until

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.sparse import worker as module
from sirtaki.comm.sparse.lanes import SparseLanes
from sirtaki.comm.sparse.plan import GATHER
from sirtaki.comm.sparse.worker import RowFormat, Rows, SparseTask, SparseWorker
from sirtaki.errors import CommError

FORM = RowFormat(9, 1, torch.float64)


def on_workers(act: Callable[[SparseWorker, ControlPlane], Any]) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        worker = SparseWorker(SparseLanes(control, timeout_s=20.0, kind=None, streams=1), control.failures)
        try:
            return act(worker, control)
        finally:
            worker.close()
            if control.failures.error is None:
                control.reclaim()

    return on_planes(2, run)


def task(name: str, row: int) -> SparseTask:
    return SparseTask(name, Rows(torch.tensor([row]), torch.ones(1, 1, dtype=torch.float64)), FORM, GATHER)


def test_ranks_may_bring_gradients_in_different_orders() -> None:
    def act(worker: SparseWorker, control: ControlPlane) -> None:
        for _ in range(20):
            worker.begin("abc")
            names = "bca" if control.rank else "cab"
            works = {name: worker.submit(task(name, "abc".index(name) + control.rank)) for name in names}
            for number, name in enumerate("abc"):
                assert works[name].wait(10.0)
                assert works[name].reduced.rows.indices.tolist() == [number, number + 1]
                assert works[name].span_s > 0.0

    on_workers(act)


def test_what_comes_early_waits_for_what_is_before_it() -> None:
    def act(worker: SparseWorker, control: ControlPlane) -> None:
        worker.begin("ab")
        second = worker.submit(task("b", 1))
        assert not second.wait(0.1)
        worker.submit(task("a", 0))
        assert second.wait(10.0)

    on_workers(act)


def test_what_fails_is_told_and_so_is_all_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(module, "reduce_rows", fail)

    def act(worker: SparseWorker, control: ControlPlane) -> None:
        worker.begin("ab")
        works = [worker.submit(task(name, 0)) for name in "ab"]
        for work in works:
            with pytest.raises(CommError, match=r"rows of a are not added up.*out of luck"):
                work.wait(10.0)
        until(lambda: control.failures.error is not None)

    with contextlib.suppress(CommError):  # of a rank that closes its control plane after it has heard
        on_workers(act)


def test_closing_ends_a_wait_for_another_rank() -> None:
    def act(worker: SparseWorker, control: ControlPlane) -> None:
        worker.begin("a")
        if control.rank == 0:
            worker.submit(task("a", 0))
            until(lambda: worker._tasks.empty())

    on_workers(act)
