"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks while they are computed."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterable, Sequence

import torch

from sirtaki.autotune.arms.base import Arm
from sirtaki.engine import job
from sirtaki.engine.warmup import NO_LOG
from sirtaki.errors import ConfigError
from sirtaki.settings import Overlap

from .adasum_optimizer import wrap_adasum
from .averaging_optimizer import AveragingOptimizer
from .compression import Compression, Compressor, NoneCompressor, _CastCompressor
from .derived_class import derive, require_plain
from .gradient_recipe import GradientRecipe
from .lasting_optimizers import keep
from .mpi_ops import Adasum, Average, Sum
from .overlapped_optimizer import OverlappedOptimizer
from .process_sets import ProcessSet, global_process_set

logger = logging.getLogger(__name__)

NamedParameters = Iterable[tuple[str, torch.Tensor]]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    arms: Sequence[Arm] | None = None,
    overlap_forward: bool | None = None,
) -> torch.optim.Optimizer:
    """Collective: an optimizer of a class derived from `optimizer`'s that reduces gradients over all ranks.

    Args:
        optimizer: the optimizer to wrap; its parameter groups and state are shared.
        named_parameters: names for messages; the same on all ranks.
        compression: how gradients travel.
        backward_passes_per_step: backward passes whose gradients are added up before they are reduced.
        op: Average or Sum of the gradients, or Adasum of the updates.
        gradient_predivide_factor: divides before the sum and multiplies after it, with Average only.
        num_groups: deprecated, use `groups`.
        groups: parameters that are reduced together, or into how many even groups to divide all; None = as tuned.
        sparse_as_dense: sparse gradients travel dense, and stay so unless the optimizer takes sparse ones only.
        process_set: the ranks that train together; on others nothing is reduced.
        arms: search techniques to tune with, instead of the usual ones.
        overlap_forward: `step()` returns at once, and parameters are updated in the next forward pass, each before it
            is read; None = as `SIRTAKI_OVERLAP_FORWARD` says.

    Raises:
        ValueError: an argument is invalid, the optimizer is a distributed one already, or (on all ranks) one of its
            parameters belongs to another distributed optimizer with other options, or (with `overlap_forward=True`) it
            does not update each parameter by itself.
        MismatchError: on all ranks, if their models differ.
    """
    require_plain(optimizer)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer takes op=Average, op=Sum or op=Adasum, not {op!r}")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    named = _named_parameters(optimizer, named_parameters)
    divided = _divide(groups, [param for _, param in named if param.requires_grad])
    current = job.current()
    overlaps = current.settings.overlap_forward is not Overlap.OFF if overlap_forward is None else overlap_forward
    if op == Adasum and overlap_forward:
        raise ConfigError("overlap_forward does not go with op=Adasum, which combines updates, not gradients")
    if op == Adasum and (current.control.size > 1 or current.elastic is not None):
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        logger.info("Adasum is not tuned%s", NO_LOG if current.settings.trial_log else "")
        combining = wrap_adasum(optimizer, named, compression=compression)
        keep(combining, current)
        return combining
    recipe = GradientRecipe(
        named=named,
        wire_dtype=_wire_dtypes(compression),
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=divided,
        arms=arms,
        process_set=process_set,
        overlaps=overlaps,
    )
    distributed: AveragingOptimizer
    if overlaps:
        overlapped: OverlappedOptimizer = derive(OverlappedOptimizer, optimizer)
        overlapped._begin_overlap(refuses=bool(overlap_forward))
        distributed = overlapped
    else:
        distributed = derive(AveragingOptimizer, optimizer)
    distributed._begin(recipe)
    keep(distributed, current)
    return distributed


def _divide(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, params: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """The groups that `groups=` means.

    Raises:
        ValueError: neither a number that is not negative nor lists of parameters.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and groups > 0:
        count = min(groups, len(params))
        bounds = [len(params) * number // count for number in range(count + 1)] if count else [0]
        return [params[start:stop] for start, stop in itertools.pairwise(bounds)]
    if isinstance(groups, int | str) or not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    lists = [list(group) for group in groups]
    members = [param for group in lists for param in group]
    if not all(isinstance(param, torch.Tensor) for param in members):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(param) for param in members}) != len(members):
        raise ValueError("A parameter can only appear once in groups.")
    return lists


def _named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> list[tuple[str, torch.Tensor]]:
    """Every parameter of the optimizer with a name.

    Raises:
        ValueError: as Horovod: no pairs, a name twice, a parameter without a name.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    given = [] if named_parameters is None else list(named_parameters)
    if not all(isinstance(item, tuple) for item in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in given]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    if not given:
        given = [(f"parameter.{number}", param) for number, param in enumerate(params)]
    name_of = {id(param): name for name, param in given}
    unnamed = [param for param in params if id(param) not in name_of]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {len(unnamed)} model parameters were not named. "
            "Python list of all parameters must be passed, including frozen ones."
        )
    return [(name_of[id(param)], param) for param in params]


def _wire_dtypes(compression: type[Compressor]) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    if issubclass(compression, NoneCompressor):
        return ()
    if not issubclass(compression, _CastCompressor):
        raise ConfigError(f"compression= takes Compression.none, .fp16 or .bf16, not {compression!r}")
    # Of all parameters that there are or may be, so that optimizers of one compression agree on those that they share.
    return tuple((dtype, compression.wire) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64))
