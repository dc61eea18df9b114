"""Random programs over DistributedDataParallel with `ddp.attach`, and their reference in one process.

A rank's gradient is what `.backward()` computes, added to `.grad`, and changed by the user's hooks. Within `no_sync()`
it stays there. After any other backward pass, `.grad` is the mean over all ranks of the ranks' `.grad`, where a rank
without a gradient counts as zeros. A parameter without a gradient on all ranks keeps None. Passes of
`torch.autograd.grad` change nothing. A rank that has joined counts as zeros. The optimizers are plain ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from . import program as actions
from .program import Action, Backward, BlockKind, OptimizerSpec, Program
from .reference import Played, legal, like_parameter, require_compilable, rounded, total_of
from .replica import LOSSY, Optimizer, Replica
from .strategy import DENSE_RULES, Iterations

# ── How they are drawn ───────────────────────────────────────────────────────────────────────────────────────────────

OPTIONS = ("find_unused_parameters", "gradient_as_bucket_view", "replicate")


@st.composite
def attached_programs(
    draw: st.DrawFn, ranks: int, *, environment: dict[str, str] | None = None, compiles: bool = False
) -> Program:
    """Return a strategy for programs of `ranks` ranks."""
    return _Draw(draw, ranks, compiles=compiles).program(environment or {})


class _Draw(Iterations):
    """Random choices of one program."""

    def program(self, environment: dict[str, str]) -> Program:
        self.blocks = tuple(self.draw(st.lists(st.sampled_from(list(BlockKind)), min_size=1, max_size=5)))
        bare = Program(ranks=self.n_ranks, blocks=self.blocks, optimizers=(), actions=())
        self.names = bare.parameters
        self.sparse = tuple(name for name in self.names if bare.kind_of(name) is BlockKind.SPARSE)
        compresses = "transport" in environment  # over shared memory, nothing is compressed
        lossy = self.one(tuple(LOSSY)) if compresses and self.maybe(20) else ""
        seed = self.one(range(100)) if self.maybe(35) else None
        frozen = self.some(self.names)[1:] if self.maybe(15) else ()
        for owner in range(self.one((1, 1, 2))):
            mine = [name for name in self.names if int(name.split(".")[0]) % 2 == owner or self.maybe(10)]
            if mine:
                sparse = set(mine) & set(self.sparse)
                rule = self.one(self.rules("sgd", "adagrad") if sparse else self.rules("across", *DENSE_RULES))
                spec = OptimizerSpec(rule=rule, parameters=tuple(mine), lossy=lossy, plan_seed=seed)
                self.optimizers.append(spec)
        if not self.optimizers:
            self.optimizers.append(OptimizerSpec(rule="sgd", parameters=self.names, lossy=lossy, plan_seed=seed))
        hooks = self.early_hooks()
        made: list[Action] = []
        for _ in range(self.draw(st.integers(2, 9))):
            made += self._of_ddp() if self.maybe(70) else self._in_between()
        tuned = {} if seed is None else {"warmup_iterations": "1000"}
        return Program(
            ranks=self.n_ranks,
            blocks=self.blocks,
            optimizers=tuple(self.optimizers),
            actions=(*made, actions.Recall(), actions.Wait()),
            frozen=frozen,
            hooks=hooks,
            environment=tuple(sorted({**environment, **tuned}.items())),
            defaults=self.defaults,
            backend=self.one(("aot_eager", "eager")),
            attached=self.some(OPTIONS, 0) if self.maybe(60) else (),
        )

    def _of_ddp(self) -> list[Action]:
        """Return the actions of one iteration. All passes but the last one are usually within `no_sync()`."""
        made: list[Action] = []
        if self.maybe(6):
            made += [
                actions.Keep(optimizer=number, how=self._keep(number).how) for number in range(len(self.optimizers))
            ]
        elif not self.maybe(12):
            made.append(actions.ZeroGrad(set_to_none=not self.maybe(30)))
        passes = [self._pass(()) for _ in range(self.one((1, 1, 1, 2, 3)))]
        for number, one in enumerate(passes):
            if self.maybe(8):
                made.append(self._aside())
            if self.maybe(4):
                made.append(self.hook())
            if self.maybe(6):
                fails_at = self.one(range(len(self.blocks)))
                made += [Backward(fails_at=fails_at, apart=self.maybe(30)), actions.ZeroGrad()]
            inputs = self.some(self.names) if not one.checkpoint and self.maybe(5) else ()
            made.append(replace(one, inputs=inputs, apart=self.maybe(85 if number + 1 < len(passes) else 5)))
            if self.maybe(10):
                made.append(self.eager())
        made += self._touch()
        made += [
            actions.Step(optimizer=number, compiled=self.compiles and self.maybe(40))
            for number in range(len(self.optimizers))
            if not self.maybe(4)
        ]
        return made

    def _in_between(self) -> list[Action]:
        number = self.one(range(len(self.optimizers)))
        choices: list[Callable[[], list[Action]]] = [
            lambda: [actions.Nudge()],
            lambda: [self.hook()],
            lambda: [actions.Unhook(parameters=self.some(self.names))],
            lambda: [self.fork()],
            lambda: [actions.Save(), *self._of_ddp(), actions.Load()],
            lambda: [self.eager()],
            lambda: [self._aside()],
            lambda: [self._keep(number), *self._of_ddp(), actions.Recall()],
            lambda: [self._outside()],
            lambda: [actions.Broadcast(root=self.one(range(self.n_ranks)))],
            lambda: [actions.Epoch(batches=tuple(self.draw(st.integers(0, 4)) for _ in range(self.n_ranks)), order=())],
        ]
        return self.one(choices)()


# ── What must come out ───────────────────────────────────────────────────────────────────────────────────────────────


class AttachedReference(Played):
    """Runs a program over DistributedDataParallel for all ranks in one process."""

    def __init__(self, program: Program) -> None:
        replicas = [Replica(program, rank) for rank in range(program.ranks)]
        self._program = program
        self._plain: list[list[Optimizer]] = [
            [replica.optimizer(spec) for replica in replicas] for spec in program.optimizers
        ]
        self._sparse = {name for name in program.parameters if program.kind_of(name) is BlockKind.SPARSE}
        self._failed = self._uneven = False
        super().__init__(program, replicas)

    def _hook(self, action: actions.Hook) -> None:
        emptied = action.at == "accumulated" and action.how == "null"
        legal(not (emptied and self._sparse & set(action.parameters)), "DDP refuses a sparse gradient that is None")
        super()._hook(action)

    # ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _backward(self, action: Backward) -> None:
        self._pass(action, self._number * 100, range(len(self._replicas)))

    def _pass(self, action: Backward, number: int, active: Sequence[int]) -> None:
        reentrant, penalised = action.checkpoint == "reentrant", action.penalty or action.slopes
        legal(not self._failed, "the gradients of the failed pass are undefined")
        legal(not (reentrant and (action.inputs or penalised)), "not with reentrant checkpoints")
        legal(not (action.nested and penalised), "no second derivative")
        require_compilable(action, self._replicas)
        fused = any(spec.rule.startswith("fused") for spec in self._program.optimizers)
        legal(not (penalised and fused), "PyTorch's own fused updates misread gradients of other strides")
        found: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for rank in active:
            replica = self._replicas[rank]
            names = [n for n in action.inputs or self._program.parameters if replica.parameters[n].requires_grad]
            legal(bool(names) or not action.inputs, "nothing to compute")
            loss = replica.loss(action, number, plain=True)
            params = replica.select(names)
            grads = torch.autograd.grad(loss, params, allow_unused=True) if names else ()
            found[rank] = [(name, grad) for name, grad in zip(names, grads, strict=True) if grad is not None]
            legal(bool(found[rank]) or not action.inputs, "autograd does not visit the model")
        if action.fails_at is not None:
            self._failed = True
            return
        for rank, mine in found.items():
            for name, grad in mine:
                param = self._replicas[rank].parameters[name]
                param.grad = grad.detach().clone() if param.grad is None else param.grad + grad
                self._replicas[rank].accumulated(name)
                if param.grad is None and not action.apart and len(self._replicas) > 1:  # a hook has set it to None
                    param.grad = torch.zeros_like(param)
        if not action.apart and len(self._replicas) > 1:
            for name in self._program.parameters:
                self._average(name, active)

    def _average(self, name: str, active: Sequence[int]) -> None:
        params = [self._replicas[rank].parameters[name] for rank in active]
        if not params[0].requires_grad or all(param.grad is None for param in params):
            return
        total = total_of([param.grad for param in params], params[0], sparse=name in self._sparse)
        mean = rounded(total / len(self._replicas), params[0].dtype)
        for param in params:
            param.grad = like_parameter(mean, param)

    def _aside(self, action: actions.Aside) -> None:
        legal(not (self._uneven and action.on), "once `join()` has been used, DDP's forward() asks all ranks")
        super()._aside(action)

    # ── steps, and what is done to gradients ─────────────────────────────────────────────────────────────────────

    def _step(self, action: actions.Step) -> None:
        legal(not self._failed, "the gradients of the failed pass are undefined")
        for rank, plain in enumerate(self._plain[action.optimizer]):
            if action.compiled:  # PyTorch fuses some optimizers (SGD with momentum), which rounds differently
                self._replicas[rank].compiled_step(plain)
            else:
                plain.step()
            self._observe_step(rank, action.optimizer, self._program.optimizers[action.optimizer].parameters)

    def _zerograd(self, action: actions.ZeroGrad) -> None:
        legal(not self._failed or action.set_to_none, "gradients from before the failure are undefined")
        for replica in self._replicas:
            replica.blocks.zero_grad(action.set_to_none)
        self._failed = False

    def _edit(self, action: actions.Edit) -> None:
        legal(not self._failed, "the gradients of the failed pass are undefined")
        legal(action.how == "null" or not self._sparse & set(action.parameters), "sparse")
        for replica in self._replicas:
            replica.edit(action)

    def _read(self, action: actions.Read) -> None:
        legal(not self._failed, "the gradients of the failed pass are undefined")
        for rank, replica in enumerate(self._replicas):
            self._observe(rank, "read", replica.gradients(action.parameters))

    def _keep(self, action: actions.Keep) -> None:
        legal(not self._failed, "the gradients of the failed pass are undefined")
        names = self._program.optimizers[action.optimizer].parameters
        for replica, plain in zip(self._replicas, self._plain[action.optimizer], strict=True):
            replica.kept += replica.keeps(names, action.how)
            plain.zero_grad()

    # ── between iterations ───────────────────────────────────────────────────────────────────────────────────────

    def _save(self, action: actions.Save) -> None:
        for rank, replica in enumerate(self._replicas):
            replica.save([plain[rank] for plain in self._plain])
        self._saved = True

    def _load(self, action: actions.Load) -> None:
        legal(self._saved, "nothing was saved")
        for rank, replica in enumerate(self._replicas):
            replica.load([plain[rank] for plain in self._plain])

    def _broadcast(self, action: actions.Broadcast) -> None:
        legal(not self._failed, "the gradients of the failed pass are undefined")
        for replica in self._replicas:
            replica.blocks.load_state_dict(self._replicas[action.root].blocks.state_dict())
            replica.blocks.zero_grad()

    def _epoch(self, action: actions.Epoch) -> None:
        """Run an epoch in `model.join()`. Afterwards all ranks have the state of the last rank."""
        legal(not self._failed and not self._started and any(action.batches), "not now")
        legal("replicate" not in (self._program.attached or ()), "replicate() has no join()")
        weights = [replica.values(self._program.parameters) for replica in self._replicas]
        alike = all(np.array_equal(mine[name], each[name]) for each in weights for mine in weights for name in mine)  # type: ignore[arg-type]
        states = [str([plain[rank].state_dict() for plain in self._plain]) for rank in range(len(self._replicas))]
        legal(alike and len(set(states)) == 1, "the last rank to join is undefined")
        for batch in range(max(action.batches)):
            active = [rank for rank in range(len(self._replicas)) if batch < action.batches[rank]]
            for rank in active:
                self._replicas[rank].blocks.zero_grad()
            self._pass(Backward(), self._number * 100 + batch, active)
            for number, plain in enumerate(self._plain):
                for rank in active:
                    plain[rank].step()
                    self._observe_step(rank, number, self._program.optimizers[number].parameters)
        self._uneven = True
        last = action.batches.index(max(action.batches))
        for rank, replica in enumerate(self._replicas):
            if rank != last:
                replica.blocks.load_state_dict(self._replicas[last].blocks.state_dict())
                for plain in self._plain:
                    plain[rank].load_state_dict(copy.deepcopy(plain[last].state_dict()))
            replica.blocks.zero_grad()
            self._observe(rank, "after join", replica.values(self._program.parameters))
