"""Gradients of a model under PyTorch's DistributedDataParallel, reduced as those of an optimizer are.

DDP asks its reducer to prepare for each backward pass that is to be synchronised, and for none within `no_sync()`. A
reducer that is never asked does nothing; so another stands in its place, hears when, and has Sirtaki's hooks on the
parameters do the work. A pass ends when autograd says so: then the gradients of an iteration are complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sirtaki.errors import NotInitializedError

from .reducer import BackwardEnd, GradientReducer

if TYPE_CHECKING:
    from .hooks import GradientHooks

TOO_OFTEN = (
    "a parameter has got a gradient twice in one backward pass, as reentrant checkpoints that share it give it: "
    "DistributedDataParallel(static_graph=True) counts them, checkpoint(use_reentrant=False) avoids it"
)

CLOSED = (
    "the gradients of this model are not reduced any more: that ended {reason}; wrap it once more, "
    "DistributedDataParallel(model.module), and attach that"
)


class DdpGradients(GradientReducer):
    """Keeps the gradients of one DDP model equal on some of the ranks: an iteration is a backward pass that is due."""

    too_often = TOO_OFTEN

    _due = _begun = False
    _arrivals: Arrivals | None = None
    _active_ranks: torch.distributed.Work | None = None

    def count_arrivals(self) -> None:
        """The graph stays: a parameter may get gradients several times in a pass, as often as in the first one."""
        self._arrivals = Arrivals([param for _, param in self.named])

    def prepare(self) -> None:
        """The next backward pass is to be synchronised; DDP's forward says so.

        Raises:
            NotInitializedError: nobody reduces gradients any more.
        """
        if self.closed:
            raise NotInitializedError(CLOSED.format(reason=self.closed))
        self._due = True
        if self._arrivals is not None:
            self._arrivals.begin()

    def watch(self, output: object) -> None:
        """Has the pass noticed that begins at what the model returns.

        The first gradient may come in a pass within that one (reentrant checkpoints), whose end is not its end, or on
        some ranks not at all.
        """
        if self._due:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]  # torch's

    def divide_by(self, active_ranks: torch.distributed.Work | None) -> None:
        """Gradients of the next pass are divided by the number of ranks that have not joined, which that all-reduce
        finds, not by that of all ranks; None = as usual.
        """
        self._active_ranks = active_ranks

    def take_part(self) -> None:
        """Collective: what a backward pass of the other ranks is on one that has joined; its gradients stay."""
        params = [param for _, param in self.named]
        own = [param.grad for param in params]
        for param in params:
            param.grad = None
        self.finish_joined()
        for param, gradient in zip(params, own, strict=True):
            param.grad = gradient

    def begin_backward(self) -> GradientHooks | None:
        """See `Owner`; None: this pass is not to be synchronised, its gradients are only added up."""
        if not self._due:
            return None
        self._begin()
        return super().begin_backward() if self._arrivals is None else None

    def _begin(self, _: object = None) -> None:
        if self._due and not self._begun:
            self._begun = True
            BackwardEnd(self._end, self._fail)

    def _end(self) -> None:
        counts = []
        if self._arrivals is not None:
            counts, self._arrivals = self._arrivals.end(), None
            for number, count in enumerate(counts):
                if count:
                    self.arrive(number)
        self._due = self._begun = False
        self._end_backward()
        self.finish()
        if counts:
            self.set_passes([max(1, count) for count in counts])
        if self._active_ranks is not None:
            self._active_ranks.wait()
            share = len(self.ranks) / float(self._active_ranks.result()[0])
            torch._foreach_mul_([param.grad for _, param in self.named if param.grad is not None], share)

    def _fail(self) -> None:
        self._due = self._begun = False


class Arrivals:
    """Counts how often a gradient of each parameter comes in a backward pass."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """Begins to."""
        self._params = params
        self.begin()
        self._handles = [
            param.register_post_accumulate_grad_hook(partial(self._count, number))  # type: ignore[no-untyped-call]
            for number, param in enumerate(params)
        ]

    def begin(self) -> None:
        """Nothing has come."""
        self._counts = [0] * len(self._params)

    def end(self) -> list[int]:
        """Counts no more."""
        for handle in self._handles:
            handle.remove()
        return self._counts

    def _count(self, number: int, _: torch.Tensor) -> None:
        self._counts[number] += 1


class AtRest:
    """What a DDP model holds in place of its reducer, which does nothing any more but answer questions.

    Its methods are those by which DDP's Python code has gradients reduced (torch/nn/parallel/distributed.py).
    """

    def __init__(self, reducer: Any, gradients: DdpGradients) -> None:
        """`reducer` is DDP's (Any: it is a class of C++ without types)."""
        self._reducer, self._gradients = reducer, gradients

    def __getattr__(self, name: str) -> Any:  # Any: as the reducer has it
        if name.startswith("_pybind11_"):  # by which C++ would find the reducer in here, and give it a hook
            raise AttributeError(name)
        return getattr(self._reducer, name)

    def __repr__(self) -> str:
        # What PyTorch says where it is given this, to register a communication hook, and cannot take it.
        return "<reducer at rest since sirtaki.torch.ddp.attach(); no communication hook goes with it>"

    def prepare_for_backward(self, _: object) -> None:
        """Before each backward pass that is to be synchronised."""
        self._gradients.prepare()

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        pass

    def _delay_all_reduce(self) -> None:
        pass

    def _set_forward_pass_work_handle(self, work: torch.distributed.Work, by_all: bool) -> None:
        """In `join()`, before each forward: `work` adds up who has not joined."""
        self._gradients.divide_by(None if by_all else work)

    def _get_zeros_like_grad_buckets(self) -> list[object]:
        """In `join()`, on a rank that has joined: for the other ranks' backward pass; no bucket is left to reduce."""
        self._gradients.take_part()
        return []


class Outputs:
    """A forward hook of a DDP model. In a copy of the model, whose reducer is PyTorch's own, it does nothing."""

    def __init__(self, gradients: DdpGradients | None = None) -> None:
        """`gradients` are the model's; None = nobody's."""
        self._gradients = gradients

    def __call__(self, _module: object, _inputs: object, output: object) -> None:
        """PyTorch's call."""
        if self._gradients is not None and not torch.compiler.is_compiling():
            self._gradients.watch(output)

    def __reduce__(self) -> tuple[type[Outputs], tuple[()]]:
        return Outputs, ()


def _tensors(found: object) -> Iterator[torch.Tensor]:
    """Those in containers."""
    inside: Iterable[object] = ()
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        inside = found.values()
    elif isinstance(found, list | tuple):
        inside = found
    elif dataclasses.is_dataclass(found):
        inside = vars(found).values()
    for item in inside:
        yield from _tensors(item)
