"""What a translation does not begin with: each is said with its line."""

from __future__ import annotations

import libcst as cst

from .edits import Edits
from .flows import Kind
from .source import Source, called_attribute, walk
from .training import Training

FRAMEWORKS = {
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "fairscale": "FairScale",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "ignite": "Ignite",
}
STARTS_PROCESSES = {"torch.multiprocessing.spawn", "multiprocessing.Process", "torch.multiprocessing.Process"}
CLOCKS = {"time.time", "time.perf_counter", "time.monotonic", "datetime.datetime.now", "time.process_time"}


def look_for_what_cannot_be(training: Training, edits: Edits) -> None:
    """Notes obstacles."""
    source = training.source
    for name, title in FRAMEWORKS.items():
        if source.imports(name):
            edits.refuse(1, f"{title} has its own ways of training on several processes")
    if source.imported.get("torch") != "torch":
        edits.refuse(1, "`import torch` is missing")
    if not training.backward_passes():
        edits.refuse(1, "nowhere is `backward()` called: there is nothing to average")
    elif not training.flows.made(Kind.OPTIMIZER):
        edits.refuse(
            source.line(training.backward_passes()[0]), "no optimizer of torch.optim is made for these gradients"
        )
    for call in source.all(cst.Call):
        name = source.full_name(call.func)
        if name in STARTS_PROCESSES or name.startswith("torch.distributed.fsdp"):
            edits.refuse(source.line(call), f"`{name}` starts or divides work itself")
        elif name in ("torch.autograd.backward", "exec", "eval") or called_attribute(call) == "manual_backward":
            edits.refuse(source.line(call), f"cannot look into `{source.code(call)}`")
    _look_for_clocks(training, edits)


def _look_for_clocks(training: Training, edits: Edits) -> None:
    """Loops that end when time is over end at different times on different ranks."""
    source = training.source
    timed = {
        node.value for assign in source.all(cst.Assign) if _reads_clock(source, assign.value) for node in _names(assign)
    }
    for branch in source.all(cst.If):
        ends = any(isinstance(node, cst.Break | cst.Return | cst.Continue) for node in walk(branch.body))
        if ends and _depends(source, branch.test, timed) and _trains_around(training, branch):
            edits.refuse(
                source.line(branch),
                f"ranks may decide differently, each by its own clock: `{source.code(branch.test)}`",
            )
    for loop in source.all(cst.While):
        if _depends(source, loop.test, timed) and training.trains(loop.body):
            edits.refuse(
                source.line(loop), f"ranks may decide differently, each by its own clock: `{source.code(loop.test)}`"
            )


def _depends(source: Source, test: cst.BaseExpression, timed: set[str]) -> bool:
    return _reads_clock(source, test) or any(node.value in timed for node in source.all(cst.Name, test))


def _reads_clock(source: Source, node: cst.CSTNode) -> bool:
    return any(source.full_name(call.func) in CLOCKS for call in source.all(cst.Call, node))


def _names(assign: cst.Assign) -> list[cst.Name]:
    return [target.target for target in assign.targets if isinstance(target.target, cst.Name)]


def _trains_around(training: Training, node: cst.CSTNode) -> bool:
    around = training.source.above(node)
    return any(isinstance(there, cst.For | cst.While) and training.trains(there) for there in around)
