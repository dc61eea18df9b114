"""Optimizers are known again in the next generation by what they are of, the newest first."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.errors import ConfigError, NotInitializedError
from sirtaki.torch import lasting_optimizers
from sirtaki.torch.lasting_optimizers import WAITING, Distributed, attach, detach_all, detached, keep, require_attached


class Optimizer(Distributed):
    """A distributed optimizer with a signature, without ranks."""

    def __init__(self, signature: str, *, fits: bool = True) -> None:
        self.param = torch.nn.Parameter(torch.zeros(1))
        self.param.grad = torch.ones(1)
        torch.optim.Optimizer.__init__(self, [self.param], {})
        self.own, self.fits, self.attached = signature, fits, 0

    @property
    def _signature(self) -> str:
        return self.own

    def _attach(self, current: Any) -> None:
        if not self.fits:
            raise ConfigError("it does not fit")
        self.attached += 1
        self._detached = ""


def job_that(*, training: bool = False, settled: bool = True, elastic: object | None = object()) -> Any:
    return SimpleNamespace(training=training, settled=settled, elastic=elastic)


@pytest.fixture(autouse=True)
def none_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_optimizers, "_kept", [])


def test_where_ranks_stay_an_optimizer_is_attached_at_once_and_for_good() -> None:
    optimizer = Optimizer("a")
    keep(optimizer, job_that(elastic=None))
    assert (optimizer.attached, optimizer._detached) == (1, "")
    detach_all()
    assert not optimizer._detached


def test_one_made_before_training_waits_and_one_made_in_training_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before, within = Optimizer("a"), Optimizer("b")
    keep(before, job_that())
    keep(within, job_that(training=True))
    assert (before.attached, within.attached) == (0, 1)
    monkeypatch.setattr(lasting_optimizers.job, "current", lambda: job_that(settled=False))
    with pytest.raises(NotInitializedError, match=r"inside hvd\.elastic\.run"):
        require_attached(before)
    monkeypatch.setattr(lasting_optimizers.job, "current", job_that)
    require_attached(before)  # of a script that does not use elastic.run
    assert before.attached == 1


def test_of_several_alike_the_newest_are_taken_for_each_other() -> None:
    made = [Optimizer(signature) for signature in ("a", "b", "a")]
    for optimizer in made:
        keep(optimizer, job_that())
    names = detached()
    assert list(names) == ["a#1", "b#0", "a#0"]
    assert names["a#0"] is made[2]
    made[1]._closed = True
    assert list(detached()) == ["a#1", "a#0"]


@pytest.mark.lengthy
def test_a_generation_that_ends_drops_gradients_and_the_next_attaches_matching_parameters() -> None:
    fits, does_not = Optimizer("a"), Optimizer("b")
    for optimizer in (fits, does_not):
        keep(optimizer, job_that(training=True))
    detach_all()
    assert fits.param.grad is None
    does_not.fits = False
    attach(job_that(), detached(), ["a#0", "b#0"])
    assert (fits.attached, fits._detached) == (2, "")
    assert does_not._detached == "it does not fit" != WAITING


@pytest.mark.lengthy
def test_optimizers_left_in_reference_cycles_are_not_attached_again() -> None:
    gc.disable()
    try:
        left = Optimizer("a")
        keep(left, job_that(training=True))
        left.itself = left  # type: ignore[attr-defined]
        del left
        detach_all()
        assert not detached()
    finally:
        gc.enable()
