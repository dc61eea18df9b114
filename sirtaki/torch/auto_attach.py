"""Attach Sirtaki to DDP and FSDP2 models without a call in the script.

Used for the models over the backend "sirtaki", and with `SIRTAKI_ATTACH=auto` for the models over any backend
(`sirtaki.attach`).

A model is attached at the end of the first backward pass whose gradients PyTorch has reduced. All ranks reach this
point, in the same order of models. Other points are not suitable: a single rank may run a forward pass, or a backward
pass within `no_sync()`.

The ranks vote twice (`attach_vote`): whether they can attach the model, and whether all of them have connected. Only
then PyTorch's model changes. If a rank objects, PyTorch continues to reduce the gradients on all ranks.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from sirtaki.engine import job
from sirtaki.engine.autograd import NO_PASS, current_pass, when_backward_ends
from sirtaki.engine.console import start_logging
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError, SirtakiError
from sirtaki.uncompiled import exclude_from_compilation, in_compiled_autograd

from . import ddp, fsdp
from .attach_vote import AttachBallot, announce
from .fsdp.attachment import Attachment
from .fsdp.private import ranks_of_model, when_reduced

logger = logging.getLogger(__name__)

SIMULATED_BACKENDS = ("fake", "threaded")
"""Backends of PyTorch's tests, in which ranks are not processes."""


class AttachCandidate(Protocol):
    """A DDP or FSDP2 model that Sirtaki may attach."""

    kind: str
    """Name of the way in which PyTorch distributes the model, for messages and for the vote."""

    @property
    def ranks(self) -> Sequence[int]:
        """Return the global ranks that train the model."""
        ...

    @property
    def model(self) -> nn.Module:
        """Return the model that the script has passed to PyTorch."""
        ...

    def check(self) -> None:
        """Raise an exception if the model cannot be attached. Not collective."""
        ...

    def connect(self, store: Store | None) -> None:
        """Connect the ranks, which exchange their addresses by `store`. Collective."""
        ...

    def install(self) -> None:
        """Let Sirtaki communicate instead of PyTorch. Not collective."""
        ...

    def undo(self) -> None:
        """Undo `connect`, also if it has raised an exception. Not collective."""
        ...


def attach(found: AttachCandidate) -> None:
    """Attach a model if all ranks can. Otherwise PyTorch continues to communicate. Logs one line. Collective.

    After the ranks have agreed, an error in `install` is raised, because this rank would train without the others.
    """
    began_job = not job.is_initialized()
    try:
        ballot = AttachBallot(found.kind, found.ranks)
    except Exception:  # Do not vote. The other ranks then get no answer, and do not attach the model either.
        logger.warning("a model is trained without Sirtaki, because this rank cannot vote", exc_info=True)
        return
    reason = ballot.vote("check", _objection(found.check))
    if reason is None:
        reason = ballot.vote("connect", _objection(partial(found.connect, ballot.addresses)))
        if reason is None:
            found.install()
        else:
            _undo(found, began_job)
    if ballot.is_reporter:
        _log(found, reason)


def _undo(found: AttachCandidate, began_job: bool) -> None:
    try:
        found.undo()
        if began_job:
            job.undo_init("the ranks could not connect for a model")
    except Exception:  # Log every error instead of raising it, because PyTorch can train the model without Sirtaki.
        logger.debug("not everything could be undone for a model that is not attached", exc_info=True)


def _objection(step: Callable[[], None]) -> str | None:
    """Call `step`. Return None if it succeeds, else its error as the text of an objection."""
    try:
        step()
    except Exception as err:  # Return every error as an objection, because PyTorch can train the model without Sirtaki.
        logger.debug("PyTorch trains a model without Sirtaki, because of this error:", exc_info=True)
        return str(err) if isinstance(err, SirtakiError) else f"{type(err).__name__}: {err}"
    return None


def _log(found: AttachCandidate, reason: str | None) -> None:
    _start_logging()
    name = type(found.model).__name__.removeprefix(found.kind.removesuffix("2"))
    if reason is not None:
        # A rank other than 0 reports only if rank 0 does not vote. It must log a warning, because such ranks show no
        # other messages.
        level = logging.INFO if dist.get_rank() == 0 else logging.WARNING
        logger.log(
            level, "%s trains the model %s without Sirtaki; reason: %s", found.kind, name, " ".join(reason.split())
        )
        return
    params = [param for param in found.model.parameters() if param.requires_grad]
    logger.info(
        "attached the %s model %s (%d parameters, %.4g MB of gradients); from the next step on, Sirtaki sends them %s",
        found.kind,
        name,
        len(params),
        sum(param.numel() * param.element_size() for param in params) / 1e6,
        "and tunes" if Settings.from_environ().tunes else "without tuning",
    )


@functools.cache
def _start_logging() -> None:
    """Start the log, unless it was started before. If a setting is invalid, start it with the default settings."""
    if job.is_initialized():
        return
    try:
        settings = Settings.from_environ()
    except ConfigError:
        settings = Settings()
    start_logging(settings, dist.get_rank())


# ── DDP ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class DdpCandidate:
    """A DDP model whose gradients DDP itself still reduces. Holds only a weak reference to the model.

    Attributes:
        begun: whether DDP has begun to reduce the model's gradients.
    """

    kind = "DDP"

    def __init__(self, model: DistributedDataParallel, inside: nn.Module) -> None:
        """Register hooks on the parameters of `inside`, the wrapped module, to detect the end of a backward pass."""
        self._reference = weakref.ref(model)
        self.begun = False
        self.ranks: Sequence[int] = range(dist.get_world_size())
        # DDP reduces the gradients of the parameters that require them now, also if the script freezes some later. The
        # script may rename parameters, so they are identified by the objects.
        wanted = [param for param in inside.parameters() if param.requires_grad]
        self._wanted = [weakref.ref(param) for param in wanted]
        self._gradients: ddp.DdpGradients | None = None
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(_on_gradient)  # type: ignore[no-untyped-call]
            for param in wanted
        ]

    @property
    def wrapper(self) -> DistributedDataParallel:
        """Return the DDP model."""
        model = self._reference()
        assert model is not None
        return model

    @property
    def model(self) -> nn.Module:
        """Return the model that the script has wrapped."""
        model: nn.Module = self.wrapper.module
        return model

    def unhook(self) -> None:
        """Remove the hooks that detect the end of a backward pass."""
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Raise ConfigError if the model cannot be attached."""
        ddp.require_attachable(self.wrapper)

    def connect(self, store: Store | None) -> None:
        """Create the object that reduces the gradients. Collective."""
        wanted = {id(param) for reference in self._wanted if (param := reference()) is not None}
        self._gradients = ddp.connect(self.wrapper, wanted=wanted, store=store)

    def install(self) -> None:
        """Let Sirtaki, instead of DDP, reduce the model's gradients."""
        if self._gradients is not None:
            ddp.install(self.wrapper, self._gradients)

    def undo(self) -> None:
        """Close the object that reduces the gradients."""
        if self._gradients is not None:
            self._gradients.close("because the model could not be attached on all ranks")


_candidates: weakref.WeakKeyDictionary[DistributedDataParallel, DdpCandidate] = weakref.WeakKeyDictionary()
"""DDP models that are not attached yet, in the order of creation, which is equal on all ranks."""

_last_pass = NO_PASS
"""Number of the latest backward pass at whose end `_look_at_candidates` is called."""


def watch(model: DistributedDataParallel, inside: nn.Module, *, backend: str | None = None) -> None:
    """Attach a new DDP model when its first backward pass has ended. Called by DDP's constructor. Never raises.

    Args:
        model: the DDP model, which has its process group already, but not its attribute `module`.
        inside: the module that the script has wrapped.
        backend: name of the backend whose models are attached. None for models over any backend.
    """
    try:
        group = model.process_group
        used = dist.get_backend(group)
        # The group may have a backend for each device: "cpu:sirtaki,cuda:sirtaki".
        has_other_backend = backend is not None and backend not in used
        if used in SIMULATED_BACKENDS or has_other_backend or dist.get_world_size(group) == 1:
            return
        if dist.get_world_size(group) < dist.get_world_size():
            if dist.get_rank(group) == 0:
                _start_logging()
                logger.info(
                    "DDP trains a model without Sirtaki, because its process group has %d of the %d ranks",
                    dist.get_world_size(group),
                    dist.get_world_size(),
                )
            return
        announce()
        exclude_from_compilation()
        _attach_after_join()
        # A model with a reducer is not new: the script has replaced its attribute `module`.
        if model not in _candidates and not hasattr(model, "reducer"):
            _candidates[model] = DdpCandidate(model, inside)
    except Exception as err:  # Log every error instead of raising it, because DDP can train the model without Sirtaki.
        logger.warning("DDP trains a model without Sirtaki, because of %s: %s", type(err).__name__, err)


def _on_gradient(_: torch.Tensor) -> None:
    """Look at the candidates when this backward pass ends. Hook that PyTorch calls after it has accumulated a gradient.

    A model whose backward pass is compiled is not attached, because compiled autograd drops the callbacks that hooks
    queue for the end of a pass.
    """
    global _last_pass
    if in_compiled_autograd():
        for model in list(_candidates):
            _keep(model, "compiled autograd runs its backward pass")
    elif (now := current_pass()) != _last_pass:
        _last_pass = now
        when_backward_ends(_look_at_candidates)


def _look_at_candidates() -> None:
    """Find the models whose gradients DDP has begun to reduce. Called when a backward pass ends, before DDP waits."""
    for model, found in list(_candidates.items()):
        if getattr(model, "_use_python_reducer", False):
            _keep(model, 'torch._dynamo.config.optimize_ddp is "python_reducer"')
            continue
        # With a static graph, DDP has already waited for its all-reduces at the end of the first backward pass.
        done = model.static_graph and model._static_graph_delay_allreduce_enqueued
        found.begun |= done or not _is_idle(model)
    if any(found.begun for found in _candidates.values()):
        when_backward_ends(_attach_reduced)


def _is_idle(model: DistributedDataParallel) -> bool:
    """Return whether DDP has no all-reduce of the model's gradients in flight."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _attach_reduced() -> None:
    """Attach the models whose gradients DDP has reduced once. Collective, because all ranks have the same models.

    Within DDP's `join()`, some ranks take part without a backward pass. So attach models only at the end of `join()`.
    """
    for model, found in list(_candidates.items()):
        if found.begun and _is_idle(model) and not model._join_config.enable:
            _attach_ddp(model)


def _attach_ddp(model: DistributedDataParallel) -> None:
    if (found := _candidates.pop(model, None)) is not None:
        found.unhook()
        if not ddp.is_attached(model) and model not in ddp.kept_by_ddp:
            attach(found)


def _keep(model: DistributedDataParallel, reason: str) -> None:
    """Give up attaching a model, so that DDP continues to reduce its gradients.

    Rank 0 logs the reason, which is equal on all ranks.
    """
    if (found := _candidates.pop(model, None)) is not None:
        found.unhook()
        if dist.get_rank() == 0:
            _log(found, reason)


@functools.cache
def _attach_after_join() -> None:
    """Extend DDP's `join()`, so that it attaches models at its end, which all ranks reach together. Called once."""
    leave = Join.__exit__

    @functools.wraps(leave)
    def __exit__(self: Join, kind: Any, error: Any, trace: Any) -> None:
        leave(self, kind, error, trace)
        if kind is None and self._enable:
            for model in self._joinables:
                if isinstance(model, DistributedDataParallel):
                    _attach_ddp(model)

    Join.__exit__ = __exit__  # type: ignore[method-assign]


# ── FSDP2 ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def watch_sharded(model: nn.Module) -> None:
    """Attach a root module of FSDP2 when its first backward pass has ended. Never raises.

    Called when the first forward pass of the module begins.
    """
    try:
        ranks = ranks_of_model(model)
        if len(ranks) == 1 or dist.get_backend() in SIMULATED_BACKENDS or fsdp.is_attached(model):
            return
        announce()
        reference = weakref.ref(model)

        def reduced() -> None:
            if (found := reference()) is not None and not fsdp.is_attached(found):
                attach(Attachment(found))

        when_reduced(model, reduced)
    except Exception as err:
        # Log every error instead of raising it, because FSDP2 can train the model without Sirtaki.
        logger.warning("FSDP2 trains a model without Sirtaki, because of %s: %s", type(err).__name__, err)


@functools.cache
def log_fsdp1() -> None:
    """Log, once and on rank 0, that models of FSDP1 are not attached."""
    if dist.is_initialized() and dist.get_rank() == 0:
        _start_logging()
        logger.info(
            "FullyShardedDataParallel (FSDP1) trains its models without Sirtaki; to use Sirtaki, shard them with "
            "fully_shard() (FSDP2)"
        )
