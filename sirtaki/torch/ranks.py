"""Functions for scripts with several ranks: dividing data among ranks, calls on rank 0 only, averages over ranks."""

from __future__ import annotations

import copy
import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from sirtaki.errors import ConfigError, MismatchError

from .basics import is_initialized, rank, size
from .collectives import Average, Sum, allreduce
from .functions import broadcast_object, broadcast_parameters
from .optimizer import DistributedOptimizer

T = TypeVar("T")


class DistributedSampler(TorchDistributedSampler[Any]):
    """Sampler for one rank: yields every `size()`-th index of another sampler, starting with the `rank()`-th index.

    When an iteration over the sampler begins, all ranks take rank 0's random state, so that the other sampler yields
    the same order on all ranks. Therefore the begin of an iteration is collective. PyTorch's DistributedSampler
    shuffles by `(seed, epoch)` instead, which gives another order than `DataLoader(shuffle=True)`.
    """

    def __init__(self, order: Sampler[Any], *, drop_last: bool = False) -> None:
        """Create the sampler, which yields this rank's part of the indices of `order`.

        Args:
            order: finite sampler that yields the indices for all ranks.
            drop_last: drop the last indices if their number is not a multiple of `size()`. Otherwise repeat the first
                indices.
        """
        assert isinstance(order, Sized)
        super().__init__(order, num_replicas=size(), rank=rank(), shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]  # PyTorch uses only its length
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        take_root_random_state(self.epoch, getattr(self._order, "generator", None))
        indices = list(self._order)
        take_own_random_state()
        if self.drop_last:
            indices = indices[: self.total_size]
        return iter(shares(indices, self.num_replicas)[self.rank :: self.num_replicas])


class _EndlessSampler(Sampler[None]):
    """Sampler for a DataLoader over an IterableDataset, which needs no indices.

    The sampler sets the random state of this rank when an iteration over the DataLoader begins.
    """

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset, self.epoch = dataset, 0

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the data set, if the data set has this method."""
        self.epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[None]:
        take_root_random_state(self.epoch, None)
        take_own_random_state()
        while True:
            yield None


class _IterableShare(IterableDataset[Any]):
    """Data set that yields this rank's items of another data set: every `ranks`-th one.

    If the number of items is not a multiple of `ranks`, the last items are dropped.
    """

    def __init__(self, dataset: IterableDataset[Any], *, rank: int, ranks: int) -> None:
        self._dataset, self._rank, self._ranks = dataset, rank, ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        turn: list[Any] = []
        for item in self._dataset:
            turn.append(item)
            if len(turn) == self._ranks:
                yield turn[self._rank]
                turn.clear()

    def __len__(self) -> int:
        return len(self._dataset) // self._ranks  # type: ignore[arg-type]  # raises TypeError if the data set has no length


def take_root_random_state(epoch: int, generator: torch.Generator | None) -> None:
    """Set the random state of all ranks to that of rank 0. Collective.

    Args:
        epoch: epoch of this rank, which must equal rank 0's epoch.
        generator: further generator whose state is set, besides PyTorch's default generator. None if there is none.

    Raises:
        MismatchError: this rank is in another epoch than rank 0.
    """
    if size() == 1:
        return
    states = (torch.get_rng_state(), None if generator is None else generator.get_state(), epoch)
    state, generator_state, root_epoch = broadcast_object(states, root_rank=0)
    if epoch != root_epoch:
        raise MismatchError(
            f"rank {rank()} begins epoch {epoch}, but rank 0 begins epoch {root_epoch}: all ranks must begin the same "
            "epoch"
        )
    torch.set_rng_state(state)
    if generator is not None:
        generator.set_state(generator_state)


def take_own_random_state() -> None:
    """Set a different random state on each rank, so that noise, dropout and augmentation differ between ranks.

    Rank 0 keeps its random state. Call this function when the random states of all ranks are equal.
    """
    if rank() != 0:
        torch.manual_seed(zlib.crc32(torch.get_rng_state().numpy().tobytes()) + rank())


def shares(samples: list[T], ranks: int) -> list[T]:
    """Return the samples, followed by copies of the first ones, so that their number is a multiple of `ranks`."""
    missing = -len(samples) % ranks
    return samples + [samples[number % len(samples)] for number in range(missing)] if samples else samples


def share(batch: Any, axis: int = 0) -> Any:
    """Return this rank's rows of a batch that is equal on all ranks: every `size()`-th row.

    Args:
        batch: tensor, array or list (hence Any).
        axis: dimension of the rows.
    """
    if size() == 1:
        return batch
    rows = shares(list(range(batch.shape[axis] if hasattr(batch, "shape") else len(batch))), size())[rank() :: size()]
    if isinstance(batch, torch.Tensor):
        return batch.index_select(axis, torch.tensor(rows, dtype=torch.int64, device=batch.device))
    return batch.take(rows, axis=axis) if hasattr(batch, "take") else [batch[row] for row in rows]


def divided(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a DataLoader that yields only this rank's part of each batch.

    Raises:
        ConfigError: the batch size is not a multiple of the number of ranks, or this kind of loader is not supported.
    """
    batch_size, ranks = loader.batch_size, size()
    if batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            "ranks.divided() cannot divide a DataLoader with a custom batch sampler or batch_size=None; divide each "
            "batch with ranks.share()"
        )
    if batch_size % ranks:
        less, more = batch_size - batch_size % ranks, batch_size + -batch_size % ranks
        fitting = f"{less} or {more}" if less else f"{more}"
        raise ConfigError(
            f"the DataLoader's batch_size must be a multiple of the number of ranks ({ranks}), not {batch_size}; use "
            f"batch_size={fitting}"
        )
    part = copy.copy(loader)
    sampler: Any
    if isinstance(loader.dataset, IterableDataset):
        sampler = _EndlessSampler(loader.dataset)
        dataset: Any = _IterableShare(loader.dataset, rank=rank(), ranks=ranks) if ranks > 1 else loader.dataset
    else:
        order: Any = loader.sampler  # Typed as Any, because PyTorch declares an Iterable, but requires a length.
        sampler, dataset = DistributedSampler(order, drop_last=loader.drop_last), loader.dataset
    # Set the attributes without the check of DataLoader, which rejects assignments because its iterators may use the
    # old values. The copy has no iterator yet.
    vars(part).update(
        _whole=loader,
        dataset=dataset,
        sampler=sampler,
        batch_size=batch_size // ranks,
        batch_sampler=BatchSampler(sampler, batch_size // ranks, loader.drop_last),
    )
    return part


def whole(loader: Iterable[T]) -> Iterable[T]:
    """Return the original of a DataLoader that `divided` has copied. The original yields the data of all ranks.

    Return other loaders unchanged.
    """
    undivided: Iterable[T] = getattr(loader, "_whole", loader)
    return undivided


P = ParamSpec("P")


class _Nobody:
    """Placeholder on ranks other than 0 for an object that only rank 0 has, such as a log writer.

    All its methods do nothing.
    """

    def __getattr__(self, name: str) -> _Nobody:
        return self

    def __call__(self, *args: object, **kwargs: object) -> _Nobody:
        return self

    def __setitem__(self, key: object, value: object) -> None: ...

    def __enter__(self) -> _Nobody:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __bool__(self) -> bool:
        return False


def on_root(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that only rank 0 runs it.

    On other ranks, the call returns a placeholder whose methods do nothing.

    All ranks evaluate the arguments of the call, so that the arguments may contain collectives.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_initialized() and rank() != 0:
            return _Nobody()  # type: ignore[return-value]  # stands for a T
        return function(*args, **kwargs)

    return call


def average(value: Any) -> Any:
    """Return the mean over ranks of a number, a tensor, or each number in a container. Collective, differentiable.

    Use it if `value` is a mean over the samples of this rank.
    """
    return _reduced(value, Average)


def total(value: Any) -> Any:
    """Return the sum over ranks of a number, a tensor, or each number in a container. Collective, differentiable.

    Use it if `value` is a sum over the samples of this rank, or their number.
    """
    return _reduced(value, Sum)


def mean(elements: torch.Tensor) -> torch.Tensor:
    """Return this rank's weighted mean. Its average over the ranks is the mean over the elements of all ranks.

    Collective.

    Use it for a loss if ranks have different numbers of elements, for example after a mask.
    """
    if size() == 1:
        return elements.mean()
    number: torch.Tensor = average(torch.tensor(elements.numel(), dtype=torch.float64, device=elements.device))
    return elements.sum() / number


def weighted(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a loss function whose average over ranks is the loss of the whole batch.

    Each call of the returned function is collective.

    `loss` divides by the sum of the weights of this rank's targets. The returned function divides by the sum over the
    targets of all ranks. The results differ if classes have weights, targets are ignored (`ignore_index`), or ranks
    have different numbers of elements.

    Args:
        loss: a loss of `torch.nn` or `torch.nn.functional` whose reduction is a mean.
    """

    def call(*args: Any, **options: Any) -> torch.Tensor:
        if size() == 1:
            return loss(*args, **options)
        if isinstance(loss, torch.nn.Module):
            unreduced: Callable[..., torch.Tensor] = copy.copy(loss)
            vars(unreduced)["reduction"] = "none"
        else:
            unreduced = functools.partial(loss, reduction="none")
        each = unreduced(*args, **options)
        if isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss):
            given: dict[str, Any] = {"weight": loss.weight, "ignore_index": loss.ignore_index}
        elif loss in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
            given = {}
        else:
            return mean(each)
        bound = inspect.signature(torch.nn.functional.cross_entropy).bind_partial(*args, **options).arguments | given
        logits, target = bound["input"], bound["target"]
        if target.is_floating_point():  # If the targets are probabilities, each has the weight 1.
            return mean(each)
        chosen = {name: bound[name] for name in ("weight", "ignore_index") if name in bound}
        weights: torch.Tensor = torch.nn.functional.nll_loss(
            -torch.ones_like(logits), target, reduction="sum", **chosen
        )
        whole: torch.Tensor = average(weights)
        return each.sum() / whole

    return call


def distributed(optimizer: torch.optim.Optimizer, *models: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Broadcast rank 0's models, and return a `DistributedOptimizer` for them. Collective.

    It can be used within an expression:

        optimizers = [ranks.distributed(torch.optim.SGD(net.parameters(), 0.1), net) for net in nets]

    Args:
        optimizer: optimizer of parameters of `models`.
        models: models whose parameters and buffers are broadcast, in the same order on all ranks.
        options: further arguments of `DistributedOptimizer`.
    """
    for model in models:
        broadcast_parameters(model.state_dict(), root_rank=0)
    named = models[0].named_parameters() if len(models) == 1 else None
    return DistributedOptimizer(optimizer, named_parameters=named, **options)


def _reduced(value: Any, op: int) -> Any:
    if size() == 1:
        return value
    if isinstance(value, torch.Tensor):
        whole = value if value.is_floating_point() or op == Sum else value.to(torch.get_default_dtype())
        return allreduce(whole, op=op)
    if isinstance(value, dict):
        return {key: _reduced(there, op) for key, there in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(allreduce(torch.tensor(value, dtype=torch.float64, device="cpu"), op=op).tolist())
    if op == Sum and isinstance(value, int):
        return int(allreduce(torch.tensor(value, dtype=torch.int64, device="cpu"), op=op))
    return float(allreduce(torch.tensor(float(value), dtype=torch.float64, device="cpu"), op=op))


def agreed(value: T) -> T:
    """Return rank 0's value on all ranks. Use it where the ranks' values may differ by rounding errors. Collective."""
    if size() == 1:
        return value
    shared: T = broadcast_object(value, root_rank=0)
    return shared


__all__ = [
    "DistributedSampler",
    "agreed",
    "average",
    "distributed",
    "divided",
    "mean",
    "on_root",
    "share",
    "total",
    "weighted",
    "whole",
]
