"""A rank that runs programs one by one, received over a socket: `rank_worker.py SOCKET PID`.

Sirtaki is initialised again when the world size or the settings change, and every few programs. The rank ends when the
process PID ends. With SIRTAKI_TEST_RETUNE, programs with tuning re-tune as often as possible.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fakes import hasty, restless
from mpi4py import MPI
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torment import program as actions
from torment.forks import seen_by_child
from torment.program import Backward, Program
from torment.reference import Entry
from torment.replica import CALLS, DEFAULTS, LOSSY, OPERATIONS, Failed, Optimizer, Replica, Values, entered

import sirtaki.torch as hvd
from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.gradients.flags import FLAG_COUNT
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import GradientError
from sirtaki.torch import ddp

# ── Plays a program on one rank, as a user's script would, and writes down what a user may look at ───────────────────

OPERATORS = {"average": hvd.Average, "sum": hvd.Sum}


class RandomPlans:
    """An arm that proposes random plans: cuts anywhere, on any stream."""

    name = "torment"

    def __init__(self, seed: int, params: Callable[[], Sequence[torch.Tensor]], transport: TransportKind) -> None:
        """Seed the plans. `params` returns the parameters whose gradients are currently reduced."""
        self._rng, self._params, self._transport = np.random.default_rng(seed), params, transport

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return a plan of up to six units."""
        params = self._params()
        streams = int(self._rng.choice([1, 2, 3]))
        cuts: tuple[Cut, ...] | None = None
        if len({param.dtype for param in params}) == 1:  # otherwise there are several flat buffers
            numel = sum(param.numel() for param in params) + FLAG_COUNT
            count = int(self._rng.integers(0, min(6, numel)))
            inside = self._rng.choice(np.arange(1, numel), size=count, replace=False)
            stops = [*sorted(int(stop) for stop in inside), numel]
            cuts = tuple(Cut(stop=stop, stream=int(self._rng.integers(streams))) for stop in stops)
        knobs = Knobs(unit_bytes=65536, streams=streams, transport=self._transport, cuts=cuts)
        return [Proposal(arm=self.name, knobs=knobs, reason="drawn")]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Ignore the results."""


class Script:
    """One rank's run of a program."""

    def __init__(self, program: Program) -> None:
        """Create the model and wrap the optimizers. Collective."""
        self._program = program
        self._rank = hvd.rank()
        self._replica = Replica(program, self._rank)
        self._sets: dict[tuple[int, ...], hvd.ProcessSet] = {}
        self._started: list[tuple[str, Any]] = []
        self._number = 0
        self.trace: list[Entry] = []
        self._specs = list(program.optimizers)
        self.optimizers: list[Any] = []
        for number in range(len(self._specs)):
            self.optimizers.append(self._wrap(number))

    def play(self) -> list[Entry]:
        """Run all actions. Return the values that a user may observe, in order. Collective."""
        for number, action in enumerate(self._program.actions):
            self._number = number
            getattr(self, f"_{type(action).__name__.lower()}")(action)
        return self.trace

    def close(self) -> None:
        """Close the optimizers. Collective."""
        self.optimizers.clear()
        for process_set in self._sets.values():
            hvd.remove_process_set(process_set)

    def _observe(self, label: str, values: Values) -> None:
        self.trace.append((self._number, label, values))

    def _wanted(self, number: int) -> Sequence[torch.Tensor]:
        return [param for param in self._replica.select(self._specs[number].parameters) if param.requires_grad]

    def _wrap(self, number: int) -> Optimizer:
        """Create a distributed optimizer. Collective."""
        spec = self._specs[number]
        options: dict[str, Any] = {}
        if spec.process_set:
            if spec.process_set not in self._sets:
                self._sets[spec.process_set] = hvd.add_process_set(list(spec.process_set))
            options["process_set"] = self._sets[spec.process_set]
        if spec.plan_seed is not None:
            options["arms"] = [self._plans(spec.plan_seed, partial(self._wanted, number))]
        names = {id(param): name for name, param in self._replica.parameters.items()}
        plain = self._replica.optimizer(spec)
        with self._calls():
            return hvd.DistributedOptimizer(
                plain,
                named_parameters=[(names[id(param)], param) for param in self._replica.select(spec.parameters)],
                compression=self._compression(spec.lossy, fp16=spec.fp16),
                backward_passes_per_step=spec.passes,
                op=OPERATORS[spec.op],
                gradient_predivide_factor=spec.predivide,
                groups=spec.groups or None,
                sparse_as_dense=spec.sparse_as_dense,
                **options,
            )

    def _plans(self, seed: int, params: Callable[[], Sequence[torch.Tensor]]) -> RandomPlans:
        transport = TransportKind(dict(self._program.environment).get("transport", "shared_memory"))
        return RandomPlans(seed, params, transport)

    @staticmethod
    def _compression(lossy: str, *, fp16: bool) -> Any:
        if lossy:
            return LOSSY[lossy](hvd.Compression)
        return hvd.Compression.fp16 if fp16 else hvd.Compression.none

    # ── one action each ──────────────────────────────────────────────────────────────────────────────────────────

    def _backward(self, action: Backward) -> None:
        try:
            self._replica.backward(action, self._number * 100)
        except Failed:
            if action.fails_at is None:
                raise

    def _step(self, action: actions.Step) -> None:
        optimizer, closure = self.optimizers[action.optimizer], action.closure
        if closure is not None:
            wanted = closure

            def compute() -> Any:
                optimizer.zero_grad()
                return self._replica.backward(wanted, self._number * 100)

            optimizer.step(compute)
        else:
            with self._calls(), optimizer.skip_synchronize() if action.skip_synchronize else contextlib.nullcontext():
                self._update(optimizer, compiled=action.compiled)
        self._stepped(action.optimizer)

    def _update(self, optimizer: Optimizer, *, compiled: bool) -> None:
        if compiled:
            self._replica.compiled_step(optimizer)
        else:
            optimizer.step()

    def _calls(self) -> ExitStack:
        """Enter the modes in which this script makes calls that communicate."""
        return entered(self._program.defaults, CALLS)

    def _stepped(self, number: int) -> None:
        self._observe(f"optimizer {number}", self._replica.values(self._specs[number].parameters))
        self._observe(f"optimizer {number}", self._replica.gradients(self._specs[number].parameters))

    def _synchronize(self, action: actions.Synchronize) -> None:
        with self._calls():
            self.optimizers[action.optimizer].synchronize()

    def _zerograd(self, action: actions.ZeroGrad) -> None:
        if action.optimizer is None:
            self._replica.blocks.zero_grad(action.set_to_none)
        else:
            self.optimizers[action.optimizer].zero_grad(action.set_to_none)

    def _hook(self, action: actions.Hook) -> None:
        self._replica.hook(action)

    def _unhook(self, action: actions.Unhook) -> None:
        self._replica.unhook(action.parameters)

    def _fork(self, action: actions.Fork) -> None:
        if self._rank in action.on or not action.on:
            self._observe(f"child: {action.how}", seen_by_child(self._replica, action.how))

    def _edit(self, action: actions.Edit) -> None:
        self._replica.edit(action)

    def _tooearly(self, action: actions.TooEarly) -> None:
        optimizer, raised = self.optimizers[action.optimizer], 0.0
        try:
            self._backward(action.backward)
            self._replica.edit(actions.Edit(how=action.how, parameters=action.parameters, on=action.on))
            optimizer.step()
        except GradientError:
            raised = 1.0
        optimizer.zero_grad()
        self._observe("too early", {"raised": np.array([raised])})

    def _read(self, action: actions.Read) -> None:
        self._observe("read", self._replica.gradients(action.parameters))

    def _aside(self, action: actions.Aside) -> None:
        if self._rank in action.on or not action.on:
            self._observe("aside", self._replica.compute_aside(action, self._number * 100 + 50))

    def _keep(self, action: actions.Keep) -> None:
        self._replica.kept += self._replica.keeps(self._specs[action.optimizer].parameters, action.how)
        self.optimizers[action.optimizer].zero_grad()

    def _recall(self, action: actions.Recall) -> None:
        self._observe("kept", self._replica.recall())

    def _outside(self, action: actions.Outside) -> None:
        self._observe(f"read by {action.how}", self._replica.read(action.how))

    def _requiregrad(self, action: actions.RequireGrad) -> None:
        self._replica.require_grad(action)

    def _addgroup(self, action: actions.AddGroup) -> None:
        number = action.optimizer
        self.optimizers[number].add_param_group({"params": self._replica.select(action.parameters)})
        spec = self._specs[number]
        self._specs[number] = replace(spec, parameters=(*spec.parameters, *action.parameters))

    def _rewrap(self, action: actions.Rewrap) -> None:
        number = action.optimizer
        state = self.optimizers[number].state_dict() if action.keep_state else None
        self._replica.forget_compiled_step(self.optimizers[number])
        self.optimizers[number] = None
        if action.spec is not None:
            self._specs[number] = action.spec
        fresh = self._wrap(number)
        if state is not None:
            fresh.load_state_dict(state)
        self.optimizers[number] = fresh

    def _passes(self, action: actions.Passes) -> None:
        self.optimizers[action.optimizer].set_backward_passes_per_step(action.passes)
        self._specs[action.optimizer] = replace(self._specs[action.optimizer], passes=action.passes)

    def _save(self, action: actions.Save) -> None:
        self._replica.save(self.optimizers)

    def _load(self, action: actions.Load) -> None:
        self._replica.load(self.optimizers)

    def _convert(self, action: actions.Convert) -> None:
        self._replica.convert(action)
        self._replica.retained = None

    def _nudge(self, action: actions.Nudge) -> None:
        self._replica.nudge()

    def _broadcast(self, action: actions.Broadcast) -> None:
        with self._calls():
            if action.optimizer is None:
                hvd.broadcast_parameters(self._replica.blocks.state_dict(), root_rank=action.root)
            else:
                hvd.broadcast_optimizer_state(self.optimizers[action.optimizer], root_rank=action.root)
        self._replica.blocks.zero_grad()

    def _eager(self, action: actions.Eager) -> None:
        with self._calls():
            self._started.append((action.what, OPERATIONS[action.what].start(hvd, self._rank, self._number)))
        if not action.later:
            self._wait(actions.Wait())

    def _wait(self, action: actions.Wait) -> None:
        for what, handle in self._started:
            with self._calls():
                result = handle()
            self._observe(f"eager {what}", {"result": result.numpy().copy()})
        self._started = []

    def _epoch(self, action: actions.Epoch) -> None:
        for batch in range(action.batches[self._rank]):
            for number in action.order[batch % len(action.order)]:
                optimizer = self.optimizers[number]
                optimizer.zero_grad()
                inputs = Backward(inputs=self._specs[number].parameters)
                self._replica.backward(inputs, self._number * 100 + batch)
                with self._calls():
                    optimizer.step()
                self._stepped(number)
        last = hvd.join()
        assert action.batches[last] == max(action.batches), f"join() says that rank {last} was the last one"
        hvd.broadcast_parameters(self._replica.blocks.state_dict(), root_rank=last)
        for number in sorted({number for step in action.order for number in step}):
            with self._calls():
                hvd.broadcast_optimizer_state(self.optimizers[number], root_rank=last)
        self._replica.blocks.zero_grad()
        self._observe("after join", self._replica.values(self._program.parameters))


class Whole(nn.Module):
    """The blocks of a replica as a module for DistributedDataParallel."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.blocks, self._output = replica.blocks, replica.output

    def forward(self, *batch: Any, plain: bool) -> torch.Tensor:
        return self._output(*batch, plain=plain)


class AttachedScript(Script):
    """One rank's run of a program over DistributedDataParallel with plain optimizers."""

    def __init__(self, program: Program) -> None:
        """Create the model, wrap it and attach. Collective."""
        super().__init__(program)
        spec = program.optimizers[0]
        options = dict.fromkeys(program.attached or (), True)
        self._replicated = options.pop("replicate", False)
        self._model: Any = Whole(self._replica)  # Any: DistributedDataParallel, or the result of replicate()
        self._model = (
            replicate(self._model, **options) if self._replicated else DistributedDataParallel(self._model, **options)
        )
        arms = None
        if spec.plan_seed is not None:
            arms = [self._plans(spec.plan_seed, lambda: [p for p in self._model.parameters() if p.requires_grad])]
        with self._calls():
            ddp.attach(self._model, arms=arms, compression=self._compression(spec.lossy, fp16=False))

    def _wrap(self, number: int) -> Optimizer:
        return self._replica.optimizer(self._specs[number])

    def close(self) -> None:
        super().close()
        del self._model

    def _backward(self, action: Backward) -> None:
        with self._apart() if action.apart else contextlib.nullcontext():
            try:
                self._replica.backward(action, self._number * 100, self._model)
            except Failed:
                if action.fails_at is None:
                    raise

    def _step(self, action: actions.Step) -> None:
        with self._calls():
            self._update(self.optimizers[action.optimizer], compiled=action.compiled)
        self._stepped(action.optimizer)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        if not self._replicated:
            with self._model.no_sync():
                yield
            return
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)

    def _aside(self, action: actions.Aside) -> None:
        if self._rank in action.on or not action.on:
            self._observe("aside", self._replica.compute_aside(action, self._number * 100 + 50, self._model))

    def _epoch(self, action: actions.Epoch) -> None:
        with self._model.join():
            for batch in range(action.batches[self._rank]):
                self._model.zero_grad()
                self._replica.backward(Backward(), self._number * 100 + batch, self._model)
                for number, optimizer in enumerate(self.optimizers):
                    with self._calls():
                        optimizer.step()
                    self._stepped(number)
        for optimizer in self.optimizers:
            with self._calls():
                hvd.broadcast_optimizer_state(optimizer, root_rank=action.batches.index(max(action.batches)))
        self._model.zero_grad()
        self._observe("after join", self._replica.values(self._program.parameters))


# ── The worker ───────────────────────────────────────────────────────────────────────────────────────────────────────

PROGRAMS_PER_INIT = 12
PREFIX = "SIRTAKI_"


class Worker:
    """Runs programs on this rank."""

    def __init__(self) -> None:
        self._world: MPI.Intracomm = MPI.COMM_WORLD
        self._running: tuple[object, ...] | None = None  # world size and settings
        self._played = 0
        self._pid = os.getpid()

    def play(self, program: Program) -> tuple[str, object]:
        """Run a program. Collective.

        Returns:
            ("done", trace), ("raised", traceback), or ("idle", None) on ranks beyond the program's world size.
        """
        try:
            with entered(program.defaults, {**DEFAULTS, **CALLS}):
                self._prepare(program)
            if self._world.rank >= program.ranks:
                return "idle", None
            overlaps = "overlap_forward" in dict(program.environment)
            # With compression, too, because profiled iterations are not compressed.
            hasty.be(overlaps or any(spec.lossy for spec in program.optimizers))
            with entered(program.defaults, DEFAULTS):
                script = (Script if program.attached is None else AttachedScript)(program)
                trace = script.play()
                script.close()
            del script
            gc.collect()
        except BaseException:  # any exception, because the parent reports it
            if os.getpid() != self._pid:  # a child that ends
                raise
            return "raised", traceback.format_exc()
        return "done", trace

    def _prepare(self, program: Program) -> None:
        wanted = (program.ranks, program.environment, program.attached is None, program.defaults)
        self._played += 1
        if self._running == wanted and self._played % PROGRAMS_PER_INIT:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        hvd.shutdown()
        self._running = wanted
        given = {PREFIX + name.upper(): value for name, value in program.environment}
        if RETUNES and "SIRTAKI_WARMUP_ITERATIONS" in given:
            given.update(restless.WARM_UP)
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]
        os.environ.update({**USUAL, **given})
        gc.freeze()  # so that collections skip all imported objects
        if self._world.rank < program.ranks:
            hvd.init(comm=None if program.ranks == self._world.size else list(range(program.ranks)))
        if program.attached is not None and self._world.rank < program.ranks:
            store = dist.FileStore(f"{sys.argv[1]}.store.{self._played}", program.ranks)
            dist.init_process_group("gloo", store=store, rank=self._world.rank, world_size=program.ranks)


RETUNES = "SIRTAKI_TEST_RETUNE" in os.environ
USUAL = {f"{PREFIX}REGISTRY": "off", f"{PREFIX}LOG_LEVEL": "error", f"{PREFIX}WARMUP_ITERATIONS": "0"}


def serve(connection: Connection) -> None:
    """Run programs until the parent closes the connection or ends."""
    worker = Worker()
    connection.send((MPI.COMM_WORLD.rank, os.getpid()))
    if RETUNES:
        restless.begin(MPI.COMM_WORLD.rank)
    while True:
        try:
            text = connection.recv()
        except EOFError:
            return
        if text is None:
            break
        connection.send(worker.play(Program.from_json(text)))
    hvd.shutdown()
    MPI.Finalize()


def end_with(pid: int) -> None:
    """End this process once process `pid` has ended, even if a program hangs here."""
    while Path(f"/proc/{pid}").exists():
        time.sleep(2.0)
    os._exit(1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1]).parent
    # Print the stack of each thread when the parent has waited too long.
    stacks = (folder / f"stacks.{MPI.COMM_WORLD.rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    threading.Thread(target=end_with, args=[int(sys.argv[2])], daemon=True).start()
    serve(Client(sys.argv[1], family="AF_UNIX"))
