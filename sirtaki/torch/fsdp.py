"""For scripts that shard their model with PyTorch's `fully_shard`: one line has Sirtaki carry its shards, tuned.

for block in model.blocks: fully_shard(block)
fully_shard(model)
sirtaki.torch.fsdp.attach(model)

FSDP gathers the parameters of each module before they are used, and scatters its gradients. It waits for both where it
asks for them, and each goes over one connection. Attached, gathers and scatters go over several (`comm.shards`), and
FSDP goes on while they are under way:

    gather     begins when FSDP asks for it, is waited for when the module is used; FSDP asks some modules ahead
    scatter    begins at the end of the module's backward pass, is waited for when the whole pass ends, or when the next
               scatter (or, where memory allows, the one after it) needs its memory

Where something looks at a gradient earlier than that, the scatter is waited for at once, as FSDP does: gradients that
accumulate, are divided or cast by FSDP, are all-reduced over replicas, or have hooks of their own.

On GPUs PyTorch's own collectives go on carrying the shards, in streams that nobody waits for. What is tuned is when:
how far ahead gathers begin, what is kept for the backward pass, how many scatters may be under way, and whether they
have a communicator of their own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.autograd import Variable
from torch.distributed import ReduceOp as TorchOp
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

import sirtaki
from sirtaki.autotune.sharded import (
    MOST_SCATTERING,
    SHARDED_FILE,
    STREAMS,
    RecordedStep,
    ShardedStep,
    ShardKnobs,
    ShardLink,
    ShardSession,
    ShardSpace,
    packed_share,
)
from sirtaki.comm.compress import Codec, Quantised, Rounded, codec_of
from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import leave_together
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.shards import JointGather, JointScatter, Loss, ShardLanes, ShardWork
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.engine.console import (
    NO_LOG,
    TuningProgress,
    at_most,
    log_progress,
    progress_every_s,
    start_logging,
    tuning_ahead,
    tuning_off,
)
from sirtaki.engine.job import is_initialized
from sirtaki.engine.lanes import control_of, open_shards, untuned_streams
from sirtaki.engine.ranks import open_beside, settings_beside
from sirtaki.engine.reducing import distributed_autograd
from sirtaki.engine.settings import NEVER_S, REGISTRY_OFF, Settings
from sirtaki.engine.tuning.cache import cluster_fingerprint
from sirtaki.engine.tuning.plans import fixed_knobs
from sirtaki.errors import CommError, ConfigError, TransportError
from sirtaki.machine import at_exit, finalize, forget_at_exit
from sirtaki.measures import in_ms
from sirtaki.registry.entry import STALE_AFTER_S, ShardsKey, ShardWay
from sirtaki.registry.graph import canonical_json, digest
from sirtaki.registry.safe_store import SafeStore
from sirtaki.uncompiled import exclude_from_compilation

from . import replicated
from .compression import Choice, NoneCompressor, reduction_options
from .replicated import is_replicated

if TYPE_CHECKING:
    from sirtaki.registry.store import Store  # with SQLAlchemy, which takes a quarter of a second

logger = logging.getLogger(__name__)

UNTUNED = ShardKnobs(streams=1, ahead=2, behind=1)
"""Two modules are gathered ahead in the forward pass, so that one is on its way while FSDP puts away another one; that
takes no more memory than the backward pass, in which FSDP gathers one ahead."""

AS_PYTORCH = ShardKnobs(streams=1, ahead=0, behind=1)
"""What FSDP does by itself."""

COMMUNICATOR_BYTES = 256 << 20
"""What a further communicator of NCCL's may take on a GPU: an assumption, above its usual buffers."""

Ranks = tuple[int, ...]
_T = TypeVar("_T")
_Group = Any  # FSDP's parameter group: of a private module of PyTorch, like its state


def attach(
    model: nn.Module,
    *,
    gathers: Choice = NoneCompressor,
    scatters: Choice = NoneCompressor,
    carries: bool | None = None,
) -> None:
    """Collective, before the first forward pass: from now on Sirtaki gathers and scatters the shards of `model`, tuned.

    Whatever has started the ranks, and whatever carries their process group: Sirtaki connects them once more. The rest
    of FSDP stays as it is: its meshes, policies, hooks, checkpoints. Groups of one rank are left alone.

    Args:
        model: `fully_shard` has been called on it, and on its blocks before; or `replicate`, whose gradients are
            reduced as those of a DDP model (`sirtaki.torch.ddp`).
        gathers: how shards are packed that are gathered: `Compression.int8`, `.fp8`, `.fp16`, `.bf16` or a codec of
            the user's own. Modules compute with what was unpacked; the optimizer and checkpoints have exact shards.
            Ranks that share memory hand over what they have.
        scatters: the same for gradients, whose sum is made of what was unpacked.
        carries: whether Sirtaki carries the shards. False = PyTorch's own collectives do, or those that the user has
            given to FSDP, and Sirtaki tunes when. None = it does for parameters on the CPU, and for no others.

    Raises:
        ConfigError: PyTorch is too old, nothing is sharded, it is attached already, or shards are to be carried or
            packed that are not on the CPU; or modules have parameters on several meshes; or a compressor cannot pack a
            tensor by itself.
        MismatchError: on all ranks, if their models or compressors differ.
    """
    packing = _codec(gathers), _codec(scatters)
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        FSDPModule = None  # type: ignore[assignment,misc]
    if not hasattr(FSDPModule, "set_custom_reduce_scatter") or not hasattr(FSDPModule, "set_custom_all_gather"):
        raise ConfigError(
            f"sirtaki.torch.fsdp needs a PyTorch whose FSDPModule has set_custom_all_gather and "
            f"set_custom_reduce_scatter, and this one ({torch.__version__}) has not; "
            'init_process_group("sirtaki") goes with older ones'
        )
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError("attach() takes a model after fully_shard() or replicate(), and this one is not sharded")
    found = list(_sharded(modules))
    # Of shards of one rank PyTorch may carry the gradients; replicate() has no such shards.
    replicas = [
        each.group
        for each in found
        if is_replicated(each.group) and (carries is not False or not hasattr(each.group.mesh_info, "shard_mesh_size"))
    ]
    sharded = [each for each in found if each.group not in replicas]
    if replicas and (carries is False or (packing[0] and not sharded)):
        raise ConfigError("replicated parameters are not gathered, and Sirtaki carries their gradients")
    devices = {str(each.group.device) for each in sharded if each.group.device.type != "cpu"}
    if devices and (carries or any(packing)):
        raise ConfigError(f"Sirtaki carries and packs parameters on the CPU, and these are on {', '.join(devices)}")
    if carries is False and any(packing):
        raise ConfigError("gathers and scatters are packed where Sirtaki carries them, and not with carries=False")
    settings = Settings.from_environ()
    if not is_initialized():  # else `hvd.init()` has
        start_logging(settings, dist.get_rank())
    if replicas:
        gradients = replicated.attach(model, replicas, scatters)
        for group in replicas:
            setattr(group, _MARK, gradients or True)
        modules = [module for module in modules if not {*map(id, _groups_of(module))} & {*map(id, replicas)}]
    if not sharded:
        return
    Attached(model, modules, sharded, settings, packing, carries=not devices if carries is None else carries)


Packing = tuple[Codec | None, Codec | None]
"""What packs gathers and scatters."""


def _codec(choice: Choice) -> Codec | None:
    options = reduction_options(choice)
    if "wire_dtype" in options:
        return Rounded(dict(options["wire_dtype"])[torch.float32])
    scheme = options.get("compression")
    if scheme is None:
        return None
    if not isinstance(scheme, Quantised):
        raise ConfigError("shards are packed by int8, fp8, fp16, bf16 or an object with pack() and unpack()")
    return scheme.codec


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A module that FSDP shards, and its parameters there."""

    module: Any  # an FSDPModule
    group: _Group


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Modules that travel as one: places in the order of use.

    Attributes:
        first, last: of them.
        again: the first one that is gathered again for the backward pass.
    """

    first: int
    last: int
    again: int


class Attached:
    """The sharded modules of one model, and what carries their shards."""

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[Any],
        sharded: Sequence[_Sharded],
        settings: Settings,
        packing: Packing,
        *,
        carries: bool,
    ) -> None:
        """Collective."""
        self._settings = settings
        self.given = self.packing = packing  # as the user wants it, and as it is now
        self._sharded, self._carries = sharded, carries
        self._scatter_groups: dict[Ranks, dist.ProcessGroup] | None = None  # of scatters alone, carried by PyTorch
        self._connections = _Connections(settings, carries=carries)
        self._pending: list[ShardWork | JointScatter] = []  # scatters that nobody has waited for
        self._buckets: dict[_Group, _Bucket] = {}  # of several modules, which travel as one
        self._gathering: tuple[_Bucket, JointGather] | None = None  # of a bucket that has not begun
        self._scattering: tuple[_Bucket, JointScatter] | None = None
        self._hooked: set[_Group] = set()  # on some rank, when modules were joined
        self._used: list[int] = []  # modules in this forward pass, in order
        self._order: list[int] | None = None  # of the modules in each forward pass; empty = there is none
        self._places: dict[_Group, int] = {}  # in that order
        self.near: ShardLanes | None = None  # between the ranks of a node, which keep parameters together
        self._kept: dict[_Group, torch.Tensor] = {}  # whole parameters, or this rank's part of them
        self._in_forward = self._with_gradients = False  # in a pass of the whole model
        self._ahead: list[_Group] = []  # gathered in a forward pass, used or not
        self._scattered = False  # gradients, since the model was called
        self.trace: StepTrace | None = None  # of this step, if it is to be known
        self.knobs = UNTUNED
        numbers = {id(each.module): number for number, each in enumerate(self._sharded)}
        self.sets_prefetch = False  # nor has the user said what to gather ahead; known with the order
        groups = [each.group for each in self._sharded]
        for group in groups:
            for mesh in (group.mesh_info, group.post_forward_mesh_info):
                if mesh is not None and hasattr(mesh, "shard_process_group"):
                    self._connections.open(mesh.shard_process_group, groups, packing)
        self.node_ranks = self._node_ranks(groups)
        if self.node_ranks:
            (lanes,) = self._connections.lanes.values()
            if lanes.control.broadcast(settings.tunes and settings.fsdp_memory > 0):
                largest = max(gathered for gathered, _ in map(_bytes_of, groups))
                self.near = lanes.within_node(shard_bytes=-(-largest // self.node_ranks))
        # Models are garbage-collected at different times on different ranks, in the middle of anything.
        finalize(model, self._connections.leave)
        finalize(model, _before_updates(self).remove)
        at_exit(self._connections.close)
        if not self._connections.controls and dist.get_rank() == 0:
            no_log = NO_LOG if settings.trial_log else ""
            logger.info("shards of groups of one rank: nothing is gathered or scattered, and nothing tuned%s", no_log)
        self._tuning = _Tuning(self, len(groups), *self._connections.of_all(), settings)
        exclude_from_compilation()
        for number, each in enumerate(self._sharded):
            setattr(each.group, _MARK, self)
            if carries:
                each.module.set_custom_all_gather(_Gather(self, each.group, number))
                each.module.set_custom_reduce_scatter(_Scatter(self, each.group, number))
            else:
                each.module.set_custom_all_gather(_Gather(self, each.group, number, each.group._all_gather_comm))
                each.module.set_custom_reduce_scatter(_NotedScatter(self, each.group._reduce_scatter_comm, number))
        for module in modules:
            module.register_forward_pre_hook(_Use(self, numbers.get(id(module))), prepend=True)
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward, always_call=True)
        if model in modules:
            self._note_methods(model, numbers.get(id(model)))

    def _node_ranks(self, groups: Sequence[_Group]) -> int:
        """How many ranks of each node can keep parameters together; 0 = they cannot."""
        (mesh, *others) = {each.mesh_info.mesh: each.mesh_info for each in groups}.values()
        lanes = None if others or mesh.mesh.ndim > 1 else self.lanes(mesh.shard_process_group)
        if lanes is None or lanes.peers == lanes.control.size - 1 or lanes.control.size < dist.get_world_size():
            return 0
        return lanes.control.local_size if len(self._connections.lanes) == 1 else 0

    def lanes(self, group: dist.ProcessGroup) -> ShardLanes | None:
        """What carries shards between the ranks of that group."""
        return self._connections.lanes.get(_ranks_of(group))

    @property
    def sharded(self) -> Sequence[_Sharded]:
        """The modules in the order in which they are used, once that is known."""
        return [self._sharded[number] for number in self._order or ()]

    @property
    def on_accelerator(self) -> bool:
        """Whether parameters are somewhere else than on the CPU."""
        return any(each.group.device.type != "cpu" for each in self._sharded)

    def synchronize(self) -> None:
        """Waits until the devices of the parameters have done what was asked of them."""
        for device in {each.group.device for each in self._sharded}:
            torch.get_device_module(device).synchronize(device)

    def describe(self) -> str:
        """How the shards travel, in words."""
        return f"{self.carriers}, {self.knobs.describe()}"

    @property
    def carriers(self) -> str:
        """What carries the shards."""
        if self._carries:
            return " and ".join(sorted({lanes.kind.value for lanes in self._connections.lanes.values()}))
        return _of_pytorch([each.group for each in self._sharded])

    def searching(self, now: bool) -> None:
        """The tuner has begun, or decided; who ends before that is told so."""
        self._connections.searching = now

    def note_scatter(self, number: int) -> None:
        """Gradients of this step leave, of that module."""
        self._scattered = True
        if self.trace is not None:
            self.trace.note(number, scattered=True)

    def wait_for(self, work: ShardWork | JointGather | JointScatter) -> None:
        """Until it is done.

        Raises:
            CommError: it failed.
        """
        if self.trace is None:
            work.wait()
        else:
            self.trace.wait(work)

    # ── forward passes ───────────────────────────────────────────────────────────────────────────────────────────

    def _begin_forward(self, module: nn.Module, args: object) -> None:
        """The model is called; nothing is under way if gradients have been scattered since it was the last time."""
        if torch._C._current_graph_task_id() != -1:
            return
        distributed_autograd.refuse_sharded()
        self.wait()  # for what a backward pass that has failed has left
        self.drop_gathered_ahead()
        self.drop_kept()
        self._in_forward = True
        self._with_gradients, self._used = torch.is_grad_enabled(), []
        if self._scattered and self._with_gradients:  # an evaluation may come before the step ends
            self._scattered = False
            if self._order:
                self._tuning.end_step()

    def _note_methods(self, model: Any, number: int | None) -> None:
        """Whole passes through methods that FSDP is told of (`register_fsdp_forward_method`), which have no hooks."""
        state = model._get_fsdp_state()
        begin, end = state._pre_forward, state._post_forward  # those that hooks call are bound already

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._begin_forward(module, args)
            self.use(number)
            return begin(module, args, kwargs)

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            output = end(module, args, output)
            self._end_forward(module, args, output)
            return output

        state._pre_forward, state._post_forward = pre_forward, post_forward

    def _end_forward(self, module: nn.Module, args: object, output: object) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._in_forward = False
            self.drop_gathered_ahead()
            if self.trace is not None and torch.is_grad_enabled():
                self.trace.note()
            if output is not None and self._with_gradients:  # else it has failed
                self._compare_order(self._used)

    def _compare_order(self, used: list[int]) -> None:
        """How modules were used in a pass with gradients says what to gather ahead in the next one."""
        if self._order == [] or not used:
            return
        why = "modules are used in another order than before"
        if self._order is None:
            self._order, why = used, "modules are used more than once in a forward pass"
            if len(set(used)) == len(used):
                self._places = {each.group: place for place, each in enumerate(self.sharded)}
                states = [each.module._get_fsdp_state() for each in self._sharded]
                self.sets_prefetch = not any(
                    state._states_to_forward_prefetch or state._states_to_backward_prefetch for state in states
                )
                self._set_ahead()
                return
        if self._order != used or len(set(used)) < len(used):
            self._order, self._places, self._buckets = [], {}, {}
            for each in self._sharded:
                self._set_prefetch(each, [], [])
            self._tuning.give_up(why)

    def use(self, number: int | None) -> None:
        """A module is about to be used in a forward pass, of the model or of a part of it."""
        if not self._in_forward:
            self.drop_gathered_ahead()
        elif number is not None:
            self._used.append(number)
            if self.trace is not None and torch.is_grad_enabled():
                self.trace.note(number)

    def note_gather(self, group: _Group) -> None:
        """FSDP has its parameters gathered, perhaps ahead."""
        if group._training_state.name == "FORWARD":
            self._ahead.append(group)

    def drop_gathered_ahead(self) -> None:
        """What was gathered in a forward pass and not used in it would be old after the next step, and FSDP use it."""
        ahead, self._ahead = self._ahead, []
        for group in ahead:
            if _drop_gather(group):
                self._kept.pop(group, None)

    # ── parameters that are kept for the backward pass ───────────────────────────────────────────────────────────
    #
    # FSDP knows nothing of it: it puts the parameters away after the forward pass, and gathers them for the backward
    # pass. What was gathered for the former is then handed to it again, and nothing sent.

    def keeper_of(self, group: _Group) -> ShardLanes | bool:
        """Who keeps what is about to be gathered: the ranks of a node, which these lanes are between, or each rank."""
        if not (self._in_forward and self._with_gradients) or torch._C._current_graph_task_id() != -1:
            return False
        place = self._places.get(group)
        if place is None or not _is_gathered_again(group):
            return False
        if place in self.knobs.near and self.near is not None:
            return self.near
        return place in self.knobs.kept

    def keep(self, group: _Group, values: torch.Tensor) -> None:
        """For the backward pass that follows: whole parameters, or this rank's part of those that its node keeps."""
        self._kept[group] = values

    def take_kept(self, group: _Group) -> torch.Tensor | None:
        """What was kept for the backward pass in which this is called; once."""
        if torch._C._current_graph_task_id() == -1 or not self._kept:
            return None
        Variable._execution_engine.queue_callback(self.drop_kept)  # with what this pass has not used
        return self._kept.pop(group, None)

    def drop_kept(self) -> None:
        """It would be old after the next step."""
        self._kept.clear()

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """What is kept of parameters that it updates is dropped, what a backward pass that has failed left waited for.

        Raises:
            CommError: a scatter failed.
        """
        left = torch._C._current_graph_task_id() == -1 and (self._pending or self._scattering is not None)
        if not left and not self._kept:
            return
        updated = {id(each) for group in optimizer.param_groups for each in group["params"]}

        def updates_any(groups: Iterable[_Group]) -> bool:
            return any(id(each.sharded_param) in updated for group in groups for each in group.fsdp_params)

        if updates_any(self._kept):
            self.drop_kept()
        if left and updates_any(each.group for each in self._sharded):
            self.wait()

    # ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────

    def set(self, knobs: ShardKnobs) -> None:
        """From the next forward pass on; streams are set by who opens them."""
        self.knobs = knobs
        gathers, scatters = knobs.codecs
        self.packing = self.given[0] or gathers, self.given[1] or scatters
        self._buckets = {}
        if self._order:
            self._set_ahead()

    def _set_ahead(self) -> None:
        """The first module of a bucket has others gathered ahead, in the backward pass the last one."""
        order, knobs = self.sharded, self.knobs
        buckets = knobs.buckets(len(order))
        for number, bucket in enumerate(buckets):
            for place in bucket:
                self._set_prefetch(order[place], [], [])
            last = buckets[min(number + knobs.ahead, len(buckets) - 1)][-1]
            ahead = [order[place] for place in range(bucket[0] + 1, last + 1)]
            first = buckets[max(0, number - knobs.behind)][0]
            behind = [order[place] for place in range(bucket[-1] - 1, first - 1, -1)]
            if len(bucket) == 1:
                self._set_prefetch(order[bucket[0]], ahead, behind if knobs.behind > 1 or knobs.joined else [])
                continue
            self._set_prefetch(order[bucket[0]], ahead, [])
            self._set_prefetch(order[bucket[-1]], [], behind)
            again = [place for place in bucket if place in self.dropped and place not in (*knobs.kept, *knobs.near)]
            one = _Bucket(first=bucket[0], last=bucket[-1], again=min(again, default=bucket[0]))
            self._buckets.update({order[place].group: one for place in bucket})

    def _set_prefetch(self, each: _Sharded, ahead: Sequence[_Sharded], behind: Sequence[_Sharded]) -> None:
        if self.sets_prefetch:
            each.module.set_modules_to_forward_prefetch([other.module for other in ahead])
            each.module.set_modules_to_backward_prefetch([other.module for other in behind])

    def run(self, knobs: ShardKnobs, lanes: ShardLanes | None) -> None:
        """Collective, between two steps: that setting from the next one on, but for streams that cannot be opened.

        Args:
            knobs: the setting.
            lanes: that carry the shards; None = PyTorch does.
        """
        if lanes is None:
            self._have_pytorch(knobs)
        elif knobs.streams != self.knobs.streams:
            try:
                lanes.use(knobs.streams)
            except TransportError as err:  # on all ranks; what was used before still is
                logger.debug("%d streams cannot be used: %s", knobs.streams, err)
        if lanes is not None and knobs.joined:  # what is joined must be the same on all ranks
            hooked = np.array([float(_is_hooked(each.group)) for each in self._sharded])
            anywhere = lanes.control.maximum(hooked)
            self._hooked = {each.group for each, one in zip(self._sharded, anywhere, strict=True) if one}
        self.set(knobs)

    def _have_pytorch(self, knobs: ShardKnobs) -> None:
        """Collective: so many scatters under way, over a communicator of their own or over that of gathers."""
        if knobs.scattering != self.knobs.scattering:
            for each in self._sharded:
                each.group.comm_ctx.reduce_scatter_max_input_buffers = knobs.scattering
        if knobs.streams == self.knobs.streams:
            return
        groups = [each.group for each in self._sharded if each.group.mesh_info.shard_mesh_size > 1]
        if self._scatter_groups is None:
            token, apart = self._tuning.agreed_name(), dict[Ranks, dist.ProcessGroup]()
            try:
                for group in groups:
                    process_group = group.mesh_info.shard_process_group
                    if (ranks := _ranks_of(process_group)) not in apart:
                        apart[ranks] = _another_group(process_group, group.device, token)
            except (AttributeError, TypeError) as err:  # a PyTorch that makes groups otherwise; on all ranks
                logger.debug("scatters cannot have a communicator of their own: %s", err)
                return
            self._scatter_groups = apart
        for group in groups:
            mesh = group.mesh_info
            own = self._scatter_groups[_ranks_of(mesh.shard_process_group)]
            if mesh.reduce_scatter_process_group in (None, own):  # else the user has given it one meanwhile
                mesh.reduce_scatter_process_group = own if knobs.streams > 1 else None

    def settle(self) -> None:
        """Collective, between two steps: the setting is the last one. A communicator that it does not use ends."""
        if self._scatter_groups is not None and self.knobs.streams == 1:
            for own in self._scatter_groups.values():
                dist.destroy_process_group(own)
            self._scatter_groups = None

    def pytorch_can(self) -> tuple[tuple[int, ...], int]:
        """Numbers of communicators, and most scatters under way, that may be tried where PyTorch carries the shards.

        What the user has set stays.
        """
        groups = [each.group for each in self._sharded]
        if {_carrier(each._reduce_scatter_comm) for each in groups} - {"DefaultReduceScatter"}:
            return (1,), 1
        apart = any(getattr(each.mesh_info, "reduce_scatter_process_group", "unknown") for each in groups)
        world: Any = dist.group.WORLD
        if hasattr(world, "new_group") or world.bound_device_id is not None:  # which all ranks have to take part in
            apart |= any(1 < each.mesh_info.shard_mesh_size < world.size() for each in groups)
        buffers = {getattr(each.comm_ctx, "reduce_scatter_max_input_buffers", 0) for each in groups}
        return (1,) if apart else (1, 2), MOST_SCATTERING if buffers == {1} else 1

    def traced(self, lanes: ShardLanes, streams: Sequence[int]) -> ShardedStep | None:
        """Collective, after a step with a `trace`: what it tells of other settings; None = nothing.

        Args:
            lanes: that carry the shards.
            streams: numbers of connections that may be used.
        """
        trace, self.trace = self.trace, None
        spans_s = None if trace is None else trace.end(self._order or ())
        traced = lanes.control.minimum(np.array([float(spans_s is not None)]))[0] > 0.0
        if not traced or trace is None or spans_s is None:
            return None
        spans_s, sizes = lanes.control.maximum(spans_s), [_bytes_of(each.group) for each in self.sharded]
        link = measure_link(
            lanes,
            streams,
            now=self.knobs.streams,
            whole_bytes=max(gathered for gathered, _ in sizes),
            seconds=PROBES_SHARE * (time.perf_counter() - trace.begun_s),
            near=self.near,
        )
        if link is None:
            return None
        forward_s, backward_s = (tuple(each) for each in spans_s[:-1].reshape(2, -1).tolist())
        shares = [packed_share(codec) for codec in self.given]
        return ShardedStep(
            forward_s=forward_s,
            backward_s=backward_s,
            rest_s=float(spans_s[-1]),
            gathered_bytes=tuple(int(shares[0] * gathered) for gathered, _ in sizes),
            scattered_bytes=tuple(
                int(shares[1] * scattered) if span_s else 0
                for (_, scattered), span_s in zip(sizes, backward_s, strict=True)
            ),
            link=link,
        )

    # ── modules that travel as one ───────────────────────────────────────────────────────────────────────────────

    def is_hooked(self, group: _Group) -> bool:
        """Whether the user's hooks see its gradients as soon as they are there, on this rank or on another one."""
        return group in self._hooked or _is_hooked(group)

    def joins(self, group: _Group) -> bool:
        """Whether its gradients are scattered as one with those of other modules."""
        return group in self._buckets

    def joins_gathers(self, group: _Group) -> bool:
        """Whether its parameters are gathered as one with those of other modules."""
        return self._gathered_with(group) is not None

    def _gathered_with(self, group: _Group) -> _Bucket | None:
        """What the user has gathered (`unshard`) begins at once, and is waited for on each rank where it likes."""
        return self._buckets.get(group) if group._training_state.name in ("FORWARD", "PRE_BACKWARD") else None

    def send_gathers(self) -> None:
        """Collective: those of a bucket begin, if they have not."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering[1].send()

    def gather(
        self, group: _Group, lanes: ShardLanes, rows: Sequence[torch.Tensor], shard: torch.Tensor, number: int
    ) -> tuple[ShardWork | JointGather, Callable[[], None]]:
        """Collective: begins, or begins with the last one of a bucket; what to do when it has come.

        FSDP asks for the modules of a bucket one after the other; if it waits for one before, that begins it.
        """
        bucket, (codec, _) = self._gathered_with(group), self.packing
        if self._gathering is not None:
            begun, joint = self._gathering
            if joint.sent or bucket is not begun or (joint.lanes, joint.dtype) != (lanes, shard.dtype):
                self.send_gathers()
        if bucket is None:
            return lanes.gather(rows, shard, codec=codec, label=number), _nothing
        if self._gathering is None:
            self._gathering = bucket, JointGather(lanes, shard.dtype, codec=codec)
        _, joint = self._gathering
        put = joint.add(rows, shard, label=number)
        backward = torch._C._current_graph_task_id() != -1
        if self._places[group] == (bucket.again if backward else bucket.last):
            self.send_gathers()
        return joint, put

    def scatter(
        self,
        group: _Group,
        lanes: ShardLanes,
        whole: torch.Tensor,
        part: torch.Tensor,
        *,
        op: ReduceOp,
        scale: float,
        number: int,
        waits: bool,
    ) -> None:
        """Collective: begins, or begins with the last one of a bucket, in the backward pass, which waits for it.

        Args:
            group: whose gradients they are.
            lanes: between its ranks.
            whole: as the next three as `ShardLanes.scatter` takes it.
            part: for the sum.
            op: how elements are combined.
            scale: what the result is multiplied by.
            number: of the module.
            waits: for this one, at once.
        """
        bucket, (_, codec) = self._buckets.get(group), self.packing
        if self._scattering is not None:
            begun, joint = self._scattering
            alike = (joint.lanes, joint.dtype, joint.op, joint.scale) == (lanes, whole.dtype, op, scale)
            if waits or bucket is not begun or not alike:
                self.send_scatters()
        if bucket is None or waits:
            work = lanes.scatter(whole, part, op=op, scale=scale, codec=codec, label=number)
            if waits:
                self.wait_for(work)
            else:
                self._put_off(work)
            return
        if self._scattering is None:
            Variable._execution_engine.queue_callback(self.wait)
            self._scattering = bucket, JointScatter(lanes, whole.dtype, op=op, scale=scale, codec=codec)
        self._scattering[1].add(whole, part, label=number)
        if self._places[group] == bucket.first:
            self.send_scatters()

    def send_scatters(self) -> None:
        """Collective: those of a bucket begin, if they have not."""
        scattering, self._scattering = self._scattering, None
        if scattering is not None:
            self.wait_but(self.knobs.scattering - 1)
            scattering[1].send()
            self._pending.append(scattering[1])

    # ── scatters that nobody waits for ───────────────────────────────────────────────────────────────────────────

    def _put_off(self, work: ShardWork) -> None:
        """Waits for the scatter when the backward pass ends, in which this is called."""
        Variable._execution_engine.queue_callback(self.wait)
        self._pending.append(work)

    def wait(self) -> None:
        """Waits for all scatters that were put off; those of a bucket begin, if they have not.

        Raises:
            CommError: one of them failed.
        """
        self.send_scatters()
        self.wait_but(0)

    def wait_but(self, but: int) -> None:
        """Waits for all scatters that were put off and have begun, but so many of the last ones.

        Raises:
            CommError: one of them failed.
        """
        ended = max(0, len(self._pending) - but)
        pending, self._pending = self._pending[:ended], self._pending[ended:]
        for work in pending:
            self.wait_for(work)

    @property
    def whole_bytes(self) -> tuple[int, ...]:
        """Of each module's gathered parameters, in the order of use."""
        return tuple(_bytes_of(each.group)[0] for each in self.sharded)

    @property
    def joinable(self) -> tuple[int, ...]:
        """Places of modules whose shards go to the same ranks as those of the module before, as the same numbers."""
        if not self._carries or not self.sets_prefetch:
            return ()
        alike = [_alike(each.group) for each in self.sharded]
        return tuple(place for place in range(1, len(alike)) if alike[place - 1] == alike[place])

    @property
    def dropped(self) -> tuple[int, ...]:
        """Places of the modules whose parameters FSDP itself has gathered again for the backward pass."""
        return tuple(place for place, each in enumerate(self.sharded) if _is_gathered_again(each.group))


def describe_progress(session: ShardSession) -> TuningProgress:
    """How far the search has come, and what it has seen."""
    now = session.knobs.describe()
    if not math.isfinite(session.default_s):
        return TuningProgress(used=session.used, at_most=session.at_most, now=f"measuring the default: {now}")
    best_s = session.default_s / session.seen
    seen, steps = "nothing seen that beats the default", in_ms(best_s)
    if session.seen > 1.0:
        seen = f"fastest seen so far, not yet proved: {in_ms(session.default_s - best_s)} a step less"
        steps = f"{in_ms(session.default_s)} → {steps}"
    return TuningProgress(
        used=session.used,
        at_most=session.at_most,
        left=at_most((session.at_most - session.used) * session.default_s),
        seen=seen,
        aside=f" ({steps})",
        now=f"comparing in turns: {now}",
    )


def describe_result(session: ShardSession, setting: str) -> str:
    """What the search has found, in one line."""
    found = "the default stays"
    if session.proved is not None:
        after_s = session.default_s / session.proved.times
        found = f"steps are {session.proved.describe()}: {in_ms(after_s)} instead of {in_ms(session.default_s)}"
    steps, settings = f"{session.used} step", f"{session.tried} setting"
    steps, settings = (one + ("" if one.startswith("1 ") else "s") for one in (steps, settings))
    return f"tuned in {steps} with {settings}: {found}; {setting} ({session.why})"


class StepTrace:
    """When the training thread has used and scattered modules in one step, and how long it has waited meanwhile."""

    def __init__(self) -> None:
        self.begun_s, self._waited_s = time.perf_counter(), 0.0
        self._computed_s = self.begun_s  # less what was waited for
        self._forward: dict[int, float] = {}
        self._backward: dict[int, float] = {}
        self._now: int | None = None  # used in the forward pass
        self._twice = False

    def wait(self, work: ShardWork | JointGather | JointScatter) -> None:
        """Until it is done."""
        begun_s = time.perf_counter()
        work.wait()
        self._waited_s += time.perf_counter() - begun_s

    def note(self, number: int | None = None, *, scattered: bool = False) -> None:
        """That module is used, or its gradients leave; None = the forward pass has ended."""
        spent_s = self._spend()
        spans, of = (self._backward, number) if scattered else (self._forward, self._now)
        if of is not None:
            self._twice |= of in spans
            spans[of] = spent_s
        if not scattered:
            self._now = number

    def end(self, order: Sequence[int]) -> NDArray[np.float64] | None:
        """Seconds of computation, `(2 modules + 1,)`: forward, backward, the rest. None if some module ran twice."""
        rest_s = self._spend()
        if self._twice or len(self._forward) != len(order):
            return None
        forward_s = [self._forward[number] for number in order]
        backward_s = [self._backward.get(number, 0.0) for number in order]
        return np.maximum([*forward_s, *backward_s, rest_s], 0.0)

    def _spend(self) -> float:
        before_s, self._computed_s = self._computed_s, time.perf_counter() - self._waited_s
        return self._computed_s - before_s


class _Tuning:
    """Finds the fastest setting in the first steps; rank 0 of the model's ranks decides, the others follow.

    What it finds is remembered, and tried first by the next job.
    """

    def __init__(
        self,
        attached: Attached,
        modules: int,
        control: ControlPlane | None,
        lanes: ShardLanes | None,
        settings: Settings,
    ) -> None:
        """Of the ranks that `control` has; None = one alone. Without lanes PyTorch carries the shards."""
        self._attached, self._control, self._lanes, self._settings = attached, control, lanes, settings
        self._shares_memory = lanes is not None and lanes.kind is TransportKind.SHARED_MEMORY
        self._active = control is not None and settings.tunes
        self._session: ShardSession | None = None  # on rank 0, as the next one
        self._key: ShardsKey | None = None  # of what is remembered; None = nothing is
        self._begun_s = 0.0
        self._topology: str | None = None  # known once the search has begun
        self._told_s = -math.inf
        self._to_measure = 0  # steps with packed shards, of which the loss is told
        if lanes is None:
            attached.knobs = AS_PYTORCH
        else:
            ahead = min(UNTUNED.ahead, max(1, modules - 1))
            attached.knobs = replace(UNTUNED, streams=untuned_streams(lanes, settings), ahead=ahead)
        self._default = attached.knobs

    def end_step(self) -> None:
        """Collective: a step has ended, with nothing under way."""
        control, attached, lanes = self._control, self._attached, self._lanes
        if lanes is not None and lanes.losses is not None:
            self._measure(lanes, lanes.losses)
        if not self._active or control is None:
            return
        attached.synchronize()
        if self._topology is None:
            traced = lanes if not self._shares_memory else None
            if traced is not None and attached.trace is None:
                attached.trace = StepTrace()  # of the next step; on one host that tells nothing of others
                return
            remembers = self._settings.registry != REGISTRY_OFF
            self._topology = cluster_fingerprint(control, self._settings) if remembers else ""
            step = None if traced is None else attached.traced(traced, self._may_try()[0])
            if control.rank == 0:
                self._session = self._begin(control, self._topology, step)
                attached.searching(True)
            self._begun_s = time.perf_counter()
            return
        begun_s, self._begun_s = self._begun_s, time.perf_counter()
        span_s = float(control.maximum(np.array([self._begun_s - begun_s]))[0])
        told: tuple[ShardKnobs, bool] | None = None
        if self._session is not None:
            self._session.record(span_s)
            told = self._session.knobs, self._session.done
            if not self._session.done and time.monotonic() - self._told_s > progress_every_s():
                self._told_s = time.monotonic()
                log_progress(logger, describe_progress(self._session))
        knobs, done = control.broadcast(told)
        attached.run(knobs, lanes)
        if done:
            self._active = False
            attached.settle()
            self._end()
            if lanes is not None and (knobs.gathers or knobs.scatters):
                self._to_measure, lanes.losses = MEASURED_STEPS, (Loss(), Loss())
        self._begun_s = time.perf_counter()

    def give_up(self, why: str) -> None:
        """Collective, with nothing under way: steps cannot be compared any more. The default stays if none is kept."""
        if self._lanes is not None:
            self._lanes.losses = None
        if self._active and self._control is not None:
            self._active, self._attached.trace = False, None
            self._attached.searching(False)
            self._attached.synchronize()
            self._attached.run(self._default, self._lanes)
            self._attached.settle()
            if self._control.rank == 0:
                logger.info("no settings are tried any more, the default stays: %s", why)

    def agreed_name(self) -> str:
        """Collective: another one each time."""
        return "" if self._control is None else str(self._control.broadcast(uuid.uuid4().hex))

    def _measure(self, lanes: ShardLanes, losses: tuple[Loss, Loss]) -> None:
        """Collective: another step with packed shards was measured; after the last one rank 0 tells what it cost."""
        self._to_measure -= 1
        if self._to_measure:
            return
        lanes.losses = None
        kinds = ("parameters", self._attached.knobs.gathers), ("gradients", self._attached.knobs.scatters)
        told = []
        for loss, (what, name) in zip(losses, kinds, strict=True):
            total = Loss(*lanes.control.total(np.array(astuple(loss))).tolist())
            if name:
                told.append(f"{what} by {name}, {total.describe()}")
        if lanes.control.rank == 0:
            logger.info("packed as SIRTAKI_LOSSY allows: %s (all ranks, %d steps)", "; ".join(told), MEASURED_STEPS)

    def _may_try(self) -> tuple[tuple[int, ...], int, int]:
        """Numbers of streams, most scatters under way, and memory that is left for the rest."""
        attached, lanes, memory_bytes = self._attached, self._lanes, self._settings.fsdp_memory
        if lanes is not None:
            streams, scattering = tuple(n for n in STREAMS if n <= lanes.most_streams), MOST_SCATTERING
        else:
            streams, scattering = attached.pytorch_can()
            if attached.on_accelerator and len(streams) > 1:
                streams = streams if memory_bytes >= COMMUNICATOR_BYTES else ()
                memory_bytes -= COMMUNICATOR_BYTES if streams else 0
        if self._settings.streams is not None:
            streams = ()
        return tuple(sorted({attached.knobs.streams, *streams})), scattering, memory_bytes

    def _begin(self, control: ControlPlane, topology: str, step: ShardedStep | None) -> ShardSession:
        attached, settings = self._attached, self._settings
        wholes = attached.whole_bytes
        default = attached.knobs
        lossy = self._allowed()
        streams, scattering, memory_bytes = self._may_try()
        space = ShardSpace(
            modules=len(wholes),
            streams=streams,
            whole_bytes=wholes,
            dropped=attached.dropped,
            memory_bytes=memory_bytes,
            node_ranks=0 if attached.near is None else attached.node_ranks,
            lossy=lossy,
            scattering=scattering,
            joinable=attached.joinable,
            gathered_ahead=None if attached.sets_prefetch else (default.ahead, default.behind),
        )
        if topology:
            sizes = [[_description(each.group), _bytes_of(each.group)] for each in attached.sharded]
            self._key = ShardsKey(
                topology=topology,
                ranks=control.size,
                model=digest("sharded model", canonical_json(sizes))[:32],
                transport=attached.carriers if self._lanes is None else self._lanes.kind.value,
                versions={"sirtaki": sirtaki.__version__, "torch": str(torch.__version__)},
                fixed={
                    name: value for name, value in fixed_knobs(settings, lossy).items() if name in ("streams", "lossy")
                },
            )
        first = None if self._key is None else self._recall(self._key, space, default)
        if step is not None:
            logger.debug("traced %s", step)
            if settings.profile is not None:
                _write_step(RecordedStep(step=step, space=space, setting=default), Path(settings.profile.folder))
        return ShardSession(space, default, budget=settings.warmup_iterations, first=first, step=step)

    def _allowed(self) -> tuple[str, ...]:
        """Those compressors that the user allows which can pack shards here."""
        names, why = self._settings.lossy, ""
        if any(self._attached.given):
            names, why = (), "attach() was told how shards are packed"
        elif self._lanes is None:
            names, why = (), "PyTorch carries the shards"
        elif self._shares_memory:
            names, why = (), "ranks that share memory send each other nothing"
        if why and self._settings.lossy:
            logger.info("SIRTAKI_LOSSY is left aside: %s", why)
        return tuple(name for name in names if codec_of(name) is not None)

    def _end(self) -> None:
        if (session := self._session) is not None:
            self._attached.searching(False)
            stored = False
            # In the place of what a job like this one has found; where there is doubt, the next one searches anew.
            if self._key is not None and session.tried > 1 and not session.doubt:
                way = ShardWay(
                    key=self._key,
                    memory_bytes=self._settings.fsdp_memory,
                    modules=len(self._attached.sharded),
                    **asdict(self._attached.knobs),
                    gain=0.0 if session.proved is None else 1.0 - 1.0 / session.proved.times,
                    created_s=time.time(),
                )
                stored = self._attempt(lambda store: store.save_way(way), False)
            told = describe_result(session, self._attached.describe())
            logger.info("%s%s", told, "; stored in the registry" if stored else "")
            if advice := self._memory_advice(session.space):
                logger.info("%s", advice)

    def _memory_advice(self, space: ShardSpace) -> str:
        """What a step need not send if parameters were kept for which more memory must be allowed; empty if nothing."""
        attached = self._attached
        left = tuple(place for place in space.dropped if place not in (*attached.knobs.kept, *attached.knobs.near))
        who, knobs = "modules kept their", replace(attached.knobs, kept=space.dropped, near=())
        if attached.node_ranks:
            space = replace(space, node_ranks=attached.node_ranks)
            who, knobs = (
                "each node kept all",
                replace(attached.knobs, near=tuple(sorted((*attached.knobs.near, *left)))),
            )
        needed = space.extra_bytes(knobs)
        if self._shares_memory or needed <= space.memory_bytes:
            return ""
        needed += COMMUNICATOR_BYTES if attached.on_accelerator else 0  # with so much one is tried, too
        dropped = sum(space.whole_bytes[place] for place in left)
        scattered = sum(_bytes_of(each.group)[1] for each in attached.sharded)
        less = dropped / max(1, sum(space.whole_bytes) + dropped + scattered)
        if less < WORTH_MEMORY:
            return ""
        return (
            f"if {who} parameters until the backward pass, a step would send {100 * less:.0f} % less; "
            f"for as much memory as that takes it is tried (SIRTAKI_FSDP_MEMORY={math.ceil(needed / 2**20)}MiB)"
        )

    def _recall(self, key: ShardsKey, space: ShardSpace, default: ShardKnobs) -> ShardKnobs | None:
        """The newest setting that may be used here, of jobs that were allowed as much memory, or the least above it."""
        since_s, found = time.time() - STALE_AFTER_S, list[tuple[int, ShardKnobs]]()
        for way in self._attempt(lambda store: store.ways(ShardWay, key), list[ShardWay]()):
            knobs = ShardKnobs(**{each.name: getattr(way, each.name) for each in fields(ShardKnobs)})
            if way.created_s >= since_s and way.memory_bytes >= space.memory_bytes and knobs in space:
                found.append((way.memory_bytes, knobs))
        if not found:
            return None
        _, knobs = min(found, key=lambda one: one[0])
        what = "the default, as nothing was proved to be faster" if knobs == default else knobs.describe()
        logger.info("found these shards in the registry: %s", what)
        return knobs

    def _attempt(self, action: Callable[[Store], _T], otherwise: _T) -> _T:
        """Opens the registry for that only: a search lasts for many steps. Nothing of it raises into training."""
        store = SafeStore(self._settings.registry)
        try:
            return store.attempt(action, otherwise)
        finally:
            store.close()


WORTH_MEMORY = 0.05
"""The share of a step's bytes from which on it is told what keeping parameters takes."""

MEASURED_STEPS = 10
"""Of a setting that packs shards, once it is kept."""

LEAVE_S = 5.0
"""How long a rank that is done with a model waits for the others, which may still need it."""


class _Connections:
    """What carries shards between the ranks of each group of a model; refers to no module of it.

    Attributes:
        controls: what the ranks of a group agree by, by these; not of those of one rank.
        lanes: the same of what carries their shards; empty where PyTorch does.
        searching: the tuner has not decided yet; on the rank that decides.
    """

    searching = False

    def __init__(self, settings: Settings, *, carries: bool) -> None:
        self._settings, self._carries = settings, carries
        self.controls: dict[Ranks, ControlPlane] = {}
        self.lanes: dict[Ranks, ShardLanes] = {}
        self._meshes: list[tuple[Communicator, Communicator]] = []  # with one to take leave by, and for nothing else

    def open(self, process_group: dist.ProcessGroup, groups: Sequence[_Group], packing: Packing) -> None:
        """Collective over the ranks of that process group, which have the same parameter groups; once for each.

        Raises:
            MismatchError: on all ranks, they have not.
            TransportError: on all ranks, no connections can be opened.
        """
        ranks, settings = _ranks_of(process_group), self._settings
        spread_again = all(_ranks_of(group.mesh_info.shard_process_group) != ranks for group in groups)
        if len(ranks) == 1 or ranks in self.controls or (spread_again and not self._carries):
            return
        mesh = open_beside(settings, process_group)
        self._meshes.append((mesh, mesh.duplicate()))
        control = control_of(mesh, settings)
        control.require_equal(str([_description(group) for group in groups]), "the sharded model")
        control.require_equal(str((packing, self._carries)), "how shards are packed, and what carries them")
        self.controls[ranks] = control
        if self._carries:
            limits = settings_beside(process_group)
            lanes = self.lanes[ranks] = open_shards(
                control, settings=settings, timeout=lambda: limits.missing_ranks_limit_s or NEVER_S
            )
            gathered, scattered = (max(sizes) for sizes in zip(*map(_bytes_of, groups), strict=True))
            lanes.reserve(shard_bytes=-(-gathered // len(ranks)), whole_bytes=0 if spread_again else scattered)
            how, streams = "shared memory", untuned_streams(lanes, settings)
            if lanes.peers < len(ranks) - 1:
                how = f"shared memory within nodes, {streams} connections from each rank to every other node"
            elif lanes.kind is not TransportKind.SHARED_MEMORY:
                how = f"{streams} connections to each other rank"
        else:
            how = _of_pytorch(groups)
        if control.rank == 0 and not spread_again:
            then = (tuning_ahead if settings.tunes else tuning_off)(settings) + (NO_LOG if settings.trial_log else "")
            logger.info("shards of %d modules between %d ranks: %s; %s", len(groups), len(ranks), how, then)

    def of_all(self) -> tuple[ControlPlane | None, ShardLanes | None]:
        """What all ranks of all groups agree by, and what carries the shards of those; None = there is no such."""
        ranks = max(self.controls, key=len, default=())
        if all(set(other) <= set(ranks) for other in self.controls):
            return self.controls.get(ranks), self.lanes.get(ranks)
        if dist.get_rank() == 0:
            logger.info("modules are sharded between other ranks each, of which none has all: nothing is tuned")
        return None, self.lanes.get(ranks)

    def leave(self) -> None:
        """The model is gone: closes them when it is gone on the other ranks, too, and does not wait for that."""
        forget_at_exit(self.close)
        if self.controls:  # else this process is ending, and has closed them
            threading.Thread(target=self.close, name="sirtaki-leave").start()

    def close(self) -> None:
        """Collective in so far as ranks take leave of each other, for some seconds at most."""
        lanes, self.lanes, controls, self.controls = self.lanes, {}, self.controls, {}
        if self.searching:
            self.searching = False
            logger.info("the job ends while settings are tried: none is kept, the next job begins anew")
        for (mesh, farewell), ranks in zip(self._meshes, controls, strict=False):
            with suppress(CommError):  # then all know already
                if not leave_together(farewell, LEAVE_S):
                    mesh.abort(f"rank {mesh.rank} has ended, or has given up a sharded model that others use")
            farewell.free()
            mesh.free()
            if ranks in lanes:
                lanes[ranks].close()


class _Use:
    """A hook: a module is about to be used, before FSDP's own hook."""

    def __init__(self, attached: Attached, number: int | None) -> None:
        self._attached, self._number = attached, number

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch._C._current_graph_task_id() != -1:  # activations are computed again
            return
        self._attached.use(self._number)


class GatherWork(dist.Work):
    """What FSDP waits for before it uses a module."""

    def __init__(self, attached: Attached, work: ShardWork | JointGather, *then: Callable[[], None]) -> None:
        super().__init__()
        self._attached, self._work, self._then = attached, work, then

    def wait(self, timeout: object = None) -> bool:
        """Blocks until all shards have come; however long that takes, as FSDP names no limit."""
        self._attached.wait_for(self._work)
        then, self._then = self._then, ()
        for each in then:
            each()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._work.is_done()


class _Gather:
    """FSDP's `AllGather` for one module: hands over what was kept for the backward pass, and gathers what was not."""

    def __init__(self, attached: Attached, group: _Group, number: int, carrier: Any = None) -> None:
        """The carrier is whatever FSDP would have asked; None = Sirtaki carries the shards."""
        self._attached, self._group, self._number, self.carrier = attached, group, number, carrier
        self._kept: torch.Tensor | None = None  # what the next gather gets instead

    @property
    def can_keep(self) -> bool:
        """Whether what it has allocated is nobody else's."""
        return self.carrier is None or type(self.carrier).__name__ == "DefaultAllGather"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP asks for the memory of each whole module's parameters."""
        (numel,) = size
        self._kept = kept = self._attached.take_kept(self._group)
        if kept is not None and kept.numel() == numel:
            return kept
        if self.carrier is not None:
            memory: torch.Tensor = self.carrier.allocate(size, dtype=dtype, device=device)
            return memory
        lanes = self._attached.lanes(self._group._all_gather_process_group)
        if (
            lanes is None
            or kept is not None
            or self._attached.keeper_of(self._group)
            or self._attached.joins_gathers(self._group)
        ):
            return torch.empty(numel, dtype=dtype, device=device)
        self._attached.send_gathers()  # which take memory, too
        return lanes.gather_memory(numel, dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Sirtaki never waits, whatever FSDP asks for: it waits for what it gets when it uses the parameters."""
        attached, kept, self._kept = self._attached, self._kept, None
        attached.note_gather(self._group)
        if kept is not None and kept.numel() == output_tensor.numel():
            return None
        keeper = attached.keeper_of(self._group)
        if keeper is True:
            attached.keep(self._group, output_tensor)
        lanes = attached.lanes(group)
        if self.carrier is not None or lanes is None:  # the latter: a group that the mesh did not have before
            gather = self.carrier or dist.all_gather_into_tensor
            work: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        if kept is not None and attached.near is not None:
            rows = output_tensor.chunk(attached.near.control.size)
            return GatherWork(attached, attached.near.gather(rows, kept, label=self._number))
        then = partial(self._keep_part, keeper.control, output_tensor) if isinstance(keeper, ShardLanes) else _nothing
        rows = output_tensor.chunk(group.size())
        under_way, put = attached.gather(self._group, lanes, rows, input_tensor, self._number)
        return GatherWork(attached, under_way, put, then)

    def _keep_part(self, control: ControlPlane, whole: torch.Tensor) -> None:
        self._attached.keep(self._group, whole.chunk(control.size)[control.rank].clone())


class _Scatter:
    """FSDP's `ReduceScatter` for one module."""

    def __init__(self, attached: Attached, group: _Group, number: int) -> None:
        self._attached, self._group, self._number = attached, group, number
        self._whole: torch.Tensor | None = None  # the next result belongs to it

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP asks for the whole gradient first, then for this rank's part of the sum."""
        (numel,) = size
        if self._attached.joins(self._group):
            return torch.empty(numel, dtype=dtype, device=device)
        self._attached.send_scatters()  # which take memory, too
        self._attached.wait_but(self._attached.knobs.scattering - 1)  # before there is memory for more of them
        lanes = self._attached.lanes(self._group._reduce_scatter_process_group)
        whole, self._whole = self._whole, None
        if lanes is None or (
            whole is not None and whole.dtype == dtype and whole.numel() == numel * lanes.control.size
        ):
            return torch.empty(numel, dtype=dtype, device=device)
        self._whole = lanes.scatter_memory(numel, dtype)
        return self._whole

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Waits only where FSDP looks at the result before the backward pass ends."""
        lanes, recipe = self._attached.lanes(group), _recipe(op, group.size())
        if lanes is None or recipe is None:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
            return
        kind, scale = recipe
        self._attached.note_scatter(self._number)
        self._attached.scatter(
            self._group,
            lanes,
            input_tensor,
            output_tensor,
            op=kind,
            scale=scale,
            number=self._number,
            # FSDP divides the sum itself where there is no factor.
            waits=scale == 1.0 or not self._nobody_looks(output_tensor.dtype),
        )

    def _nobody_looks(self, dtype: torch.dtype) -> bool:
        """FSDP only hands the result on, as the gradient of parameters."""
        group = self._group
        return (
            dtype == group._orig_dtype
            and group._all_reduce_hook is None
            and not hasattr(group.mesh_info, "replicate_process_group")
            and not self._attached.is_hooked(group)
            and all(
                each.sharded_param.grad is None or not each.sharded_param.grad.to_local().numel()
                for each in group.fsdp_params
            )
        )


class _NotedScatter:
    """FSDP's `ReduceScatter` for one module whose shards Sirtaki does not carry: says that gradients leave."""

    def __init__(self, attached: Attached, carrier: Any, number: int) -> None:
        """Of whatever FSDP would have asked."""
        self._attached, self.carrier, self._number = attached, carrier, number
        self.allocate = carrier.allocate

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Does what the carrier does."""
        self._attached.note_scatter(self._number)
        return self.carrier(*args, **options)


MOST_LATENCY = 0.5
"""The share of a measured gather that may be its latency: more is a disturbance."""

PROBES_SHARE = 2.0
"""As many steps' time may be spent on measuring the network, more or less."""

MESSAGES = 16
"""Small ones that begin one after the other, to see what each of them takes."""

LEAST_PROBE_BYTES, PROBE_BYTES, SMALL_BYTES = 1 << 20, 4 << 20, 4 << 10
"""Of a whole tensor that is gathered to measure what carries it: at least and at most; and next to nothing."""


def measure_link(
    lanes: ShardLanes, streams: Sequence[int], *, now: int, whole_bytes: int, seconds: float, near: ShardLanes | None
) -> ShardLink | None:
    """Collective, with nothing under way: how long gathers and scatters take; None = too short to be seen.

    Args:
        lanes: to measure.
        streams: numbers of connections that may be used.
        now: that is used, before and afterwards.
        whole_bytes: of the largest tensor that is gathered.
        seconds: that may be spent, more or less.
        near: lanes within a node, if there are any.
    """
    begun_s, control, whole_bytes = (
        time.perf_counter(),
        lanes.control,
        min(max(whole_bytes, LEAST_PROBE_BYTES), PROBE_BYTES),
    )

    def took_s(lanes: ShardLanes, n_bytes: int, *, scatters: bool = False) -> float:
        whole = torch.zeros(
            lanes.control.size, -(-n_bytes // (4 * lanes.control.size)), dtype=torch.float32, device="cpu"
        )
        part, spans_s = whole[0].clone(), []
        for _ in range(2):
            lanes.control.barrier()
            start_s = time.perf_counter()
            (
                lanes.scatter(whole, part, op=ReduceOp.SUM, scale=1.0) if scatters else lanes.gather(list(whole), part)
            ).wait()
            spans_s.append(time.perf_counter() - start_s)
        return float(lanes.control.maximum(np.array([min(spans_s)]))[0])

    gather_s, scatter_s = (took_s(lanes, whole_bytes, scatters=scatters) for scatters in (False, True))
    near_s = 0.0 if near is None else took_s(near, whole_bytes)
    if not min(gather_s, scatter_s) > 0.0 or (near is not None and not near_s > 0.0):
        return None
    latency_s = min(took_s(lanes, SMALL_BYTES), MOST_LATENCY * gather_s)
    small = torch.zeros(control.size, SMALL_BYTES // (4 * control.size), dtype=torch.float32, device="cpu")
    control.barrier()
    start_s = time.perf_counter()
    for work in [lanes.gather(list(small), small[0].clone()) for _ in range(MESSAGES)]:
        work.wait()
    message_s = float(control.maximum(np.array([time.perf_counter() - start_s]))[0]) / MESSAGES
    rates = {now: whole_bytes / (gather_s - latency_s)}
    for count in sorted(streams, key=lambda count: abs(math.log(count / now))):
        if control.maximum(np.array([time.perf_counter() - begun_s - seconds]))[0] > 0.0:
            break
        if count != now:
            with suppress(TransportError):  # on all ranks; what was used before still is
                lanes.use(count)
                span_s = took_s(lanes, whole_bytes)
                rates[count] = whole_bytes / (span_s - min(latency_s, MOST_LATENCY * span_s))
    lanes.use(now)
    return ShardLink(
        latency_s=latency_s,
        gathered=rates,
        scatter_times=scatter_s / gather_s,
        message_s=message_s,
        **({"near_bytes_per_s": whole_bytes / near_s} if near_s else {}),
    )


def _write_step(recorded: RecordedStep, folder: Path) -> None:
    """For `sirtaki optimize`; training goes on where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SHARDED_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=1))
    except OSError as err:
        logger.warning("the traced step cannot be written: %s", err)


def _recipe(op: Any, size: int) -> tuple[ReduceOp, float] | None:
    """How elements are combined, and what the result is multiplied by; None if lanes cannot do that."""
    whole: Any = TorchOp(op) if isinstance(op, TorchOp.RedOpType) else op
    kind, factor = whole.__getstate__()
    if kind == TorchOp.AVG:
        return ReduceOp.SUM, 1.0 / size
    if kind == TorchOp.PREMUL_SUM:
        return ReduceOp.SUM, float(factor)
    return (ReduceOp.SUM, 1.0) if kind == TorchOp.SUM else None


_MARK = "_sirtaki_attached"
"""Attribute of FSDP's groups: who has attached them."""


def _sharded(modules: Sequence[Any]) -> Iterator[_Sharded]:
    """Those that have parameters to shard, each group of parameters once.

    Raises:
        ConfigError: see `attach`.
    """
    seen: set[int] = set()
    for module in modules:
        groups = _groups_of(module)
        if len(groups) > 1:
            raise ConfigError("attach() takes modules whose parameters are all on one mesh; this one has several")
        for group in groups:
            if id(group) in seen:  # fully_shard([one, other])
                continue
            seen.add(id(group))
            if hasattr(group, _MARK):
                raise ConfigError("this model has been attached already")
            yield _Sharded(module, group)


def _groups_of(module: Any) -> Sequence[_Group]:  # Any: an FSDPModule
    groups: Sequence[_Group] = module._get_fsdp_state()._fsdp_param_groups
    return groups


def _is_gathered_again(group: _Group) -> bool:
    """Whether FSDP puts its parameters away after the forward pass, gathers them again, and they could be kept."""
    put_away = group._reshard_after_forward and not group._use_post_forward_mesh
    return put_away and getattr(group._all_gather_comm, "can_keep", False)  # the user may have put in another one


def _is_hooked(group: _Group) -> bool:
    return any(getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) for each in group.fsdp_params)


def _nothing() -> None:
    """What follows a gather of which no part is kept."""


def _drop_gather(group: _Group) -> bool:
    """Whether one was under way."""
    if (result := group._all_gather_result) is None:
        return False
    group._all_gather_result = None
    if result.all_gather_work is not None:
        result.all_gather_work.wait()
    group._wait_all_gather_streams_on_event(result.all_gather_event)  # before the next gather gets its memory
    return True


def _ranks_of(group: dist.ProcessGroup) -> Ranks:
    return tuple(dist.get_process_group_ranks(group))


def _another_group(process_group: dist.ProcessGroup, device: torch.device, token: str) -> dist.ProcessGroup:
    """Collective over its ranks: a process group like it.

    `new_group` would name it by how many groups a rank is in, so that ranks that are in different ones do not meet, or
    as one that has ended, whose addresses are still in the store.
    """
    c10d, ranks = dist.distributed_c10d, _ranks_of(process_group)
    backend, _ = c10d._world.pg_map[process_group]
    _, store = c10d._world.pg_map[c10d._get_default_group()]
    options = getattr(process_group._get_backend(device), "options", None)
    own, _ = c10d._new_process_group_helper(
        len(ranks),
        process_group.rank(),
        list(ranks),
        backend,
        store,
        c10d.GroupName(f"sirtaki_{digest('ranks', str(ranks))[:16]}_{token}"),
        timeout=getattr(options, "_timeout", None) or c10d.default_pg_timeout,
        device_id=c10d._get_default_group().bound_device_id,
        group_desc="fsdp_reduce_scatter",
    )
    c10d._world.pg_group_ranks[own] = {rank: place for place, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, own)


def _of_pytorch(groups: Sequence[_Group]) -> str:
    """Which backends of PyTorch's would carry their shards, and which collectives of the user's own, in words."""
    names = {group.mesh_info.shard_process_group._get_backend(group.device).name() for group in groups}
    carriers = {_carrier(each) for group in groups for each in (group._all_gather_comm, group._reduce_scatter_comm)}
    own = carriers - {"DefaultAllGather", "DefaultReduceScatter"}
    return f"PyTorch's {' and '.join(sorted(names))}" + "".join(f", {name}" for name in sorted(own))


def _carrier(asked: Any) -> str:
    """The class of what carries shards where FSDP asks so, Sirtaki's own stand-ins left out."""
    return type(getattr(asked, "carrier", asked)).__name__


def _description(group: _Group) -> list[tuple[Any, ...]]:
    """What must be the same on all ranks."""
    return [
        (tuple(each.sharded_param.shape), str(each.sharded_param.dtype), each.sharded_param.requires_grad)
        for each in group.fsdp_params
    ]


def _alike(group: _Group) -> tuple[object, ...]:
    """What modules must have in common to be joined."""
    policy = group.mp_policy
    dtypes = {policy.param_dtype or each.sharded_param.dtype for each in group.fsdp_params}
    return _ranks_of(group.mesh_info.shard_process_group), group._use_post_forward_mesh, dtypes, policy.reduce_dtype


def _bytes_of(group: _Group) -> tuple[int, int]:
    """The whole parameters that ranks gather, and the whole gradient that they scatter."""
    policy, gathered, scattered = group.mp_policy, 0, 0
    for each in group.fsdp_params:
        numel, dtype = (
            each.padded_sharded_param_size.numel() * group.mesh_info.shard_mesh_size,
            each.sharded_param.dtype,
        )
        gathered += numel * (policy.param_dtype or dtype).itemsize
        scattered += numel * (policy.reduce_dtype or policy.param_dtype or dtype).itemsize
    return gathered, scattered


def _before_updates(attached: Attached) -> RemovableHandle:
    """Has `before_update` called for as long as the model exists, which this does not keep."""
    found = weakref.ref(attached)

    def before_update(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if (one := found()) is not None:
            one.before_update(optimizer)

    return register_optimizer_step_pre_hook(before_update)


def attached(model: nn.Module) -> Attached | None:
    """Return what carries the shards of that model. None if it is not attached, or replicated."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", ()):
            if isinstance(found := getattr(group, _MARK, None), Attached):
                return found
    return None


def describe(model: nn.Module) -> str:
    """How the shards of an attached model travel, in words; empty if it is not attached."""
    found = attached(model)
    return "" if found is None else found.describe()
