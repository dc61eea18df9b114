"""The end of a backward pass is told, whether it goes well or raises, as long as somebody is there to hear it."""

import weakref

import pytest
import torch
from fakes.backward import Raises

from sirtaki.engine.reducing.reducer import BackwardEnd


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def ended(self) -> None:
        self.heard.append("ended")

    def failed(self) -> None:
        self.heard.append("failed")


def loss_of(listener: weakref.ref[Listener], *, raises: bool) -> torch.Tensor:
    """The first gradient is there when the pass goes on, or raises."""
    early, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    def hook(_: torch.Tensor) -> None:
        there = listener()
        assert there is not None
        there.heard.append("begun")
        BackwardEnd(there.ended, there.failed)

    early.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    rest = late * 2.0
    return ((Raises.apply(rest) if raises else rest).exp() * early).sum()


def test_a_pass_has_ended_when_backward_returns() -> None:
    listener = Listener()
    loss_of(weakref.ref(listener), raises=False).backward()
    assert listener.heard == ["begun", "ended"]


def test_a_pass_has_failed_when_backward_raises() -> None:
    listener = Listener()
    with pytest.raises(ValueError, match="half-way"):
        loss_of(weakref.ref(listener), raises=True).backward()
    assert listener.heard == ["begun", "failed"]


def test_a_listener_is_not_kept_for_it() -> None:
    listener = Listener()
    end = BackwardEnd.__new__(BackwardEnd)
    end._ended, end._failed = weakref.WeakMethod(listener.ended), weakref.WeakMethod(listener.failed)
    end._over = False
    heard = listener.heard
    del listener
    end()
    del end
    assert heard == []
