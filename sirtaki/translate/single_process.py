"""From a script of one process to one of several ranks that trains alike."""

from __future__ import annotations

import libcst as cst

from .beginning import begin, free_name, import_lines
from .devices import place
from .edits import Edits
from .flows import Flows, Kind
from .hand_cut import HandCut
from .optimizers import Optimizers
from .output import Output
from .rank_values import RankValues
from .refusals import look_for_what_cannot_be
from .source import Source, argument
from .training import Loop, Training


def distribute(source: Source, edits: Edits) -> None:
    """Collects the changes, and what stands in their way."""
    flows = Flows(source)
    training = Training(flows)
    hvd, ranks = free_name(source, "hvd"), free_name(source, "ranks")
    look_for_what_cannot_be(training, edits)
    if edits.obstacles:
        return
    values = RankValues(training, edits, ranks=ranks)
    if training.divided:
        _divide(training, edits, ranks)
    else:
        HandCut(training, edits, ranks=ranks).divide(values)
    values.follow()
    Optimizers(training, edits, hvd=hvd).distribute(values.losses)
    output = Output(source, flows, edits, hvd=hvd, ranks=ranks)
    output.keep()
    lines = [f"{hvd}.init()", *place(source, flows, edits, hvd=hvd), *output.begins_with, *_seeds(source, ranks)]
    begin(source, edits, imports=import_lines(hvd=hvd, ranks=ranks), lines=lines)
    if "BatchNorm" in source.text:
        edits.note(0, f"batch norm sees a rank's part of a batch; `{hvd}.SyncBatchNorm` sees all of it")


def _divide(training: Training, edits: Edits, ranks: str) -> None:
    source = training.source
    for site in training.divided:
        call = site.call
        if argument(call, "batch_sampler", 5) is not None:
            edits.refuse(source.line(call), "the loader has a batch sampler of its own, which cannot be divided")
        size = argument(call, "batch_size", 1)
        starred = any(arg.star for arg in call.args)
        if (size is None and not starred) or (size is not None and source.code(size) in ("1", "None")):
            edits.refuse(source.line(call), "batches of one sample cannot be divided among ranks")
        edits.wrap(call, f"{ranks}.divided")
        if size is not None:
            _look_at_size(training, edits, size)
    for loop in training.loops:
        for name in training.loader_names(loop.iter):
            if not training.flows.sites.get(id(name)):
                text = source.code(name)
                epoch = training.epoch(loop) or f"{text}.sampler.epoch + 1"
                edits.before(source.statement(loop), f"{text}.sampler.set_epoch({epoch})")
    for relay in training.relays:
        _relay(training, edits, relay)
    for call in source.all(cst.Call):
        if isinstance(call.func, cst.Name) and call.func.value == "iter" and call.args:
            _begin_pass(training, edits, call, ranks)
    for other in training.other_loops:
        for name in training.loader_names(other.iter):
            if training.is_divided(name) and not training.flows.sites.get(id(name)):
                edits.wrap(name, f"{ranks}.whole")
        _agree(training, edits, other, ranks)
    edits.note(0, "each batch is divided among the ranks, which must divide its size; learning rates stay as they are")
    if training.other_loops:
        edits.note(0, "loops that do not train see all of their data on every rank")


def _begin_pass(training: Training, edits: Edits, call: cst.Call, ranks: str) -> None:
    loader, source = call.args[0].value, training.source
    if not training.is_divided(loader):
        return
    is_read = any(source.contains(read, call) or training.flows.values(read.args[0].value) for read in training.reads)
    if is_read:
        text = source.code(loader)
        edits.before(source.statement(call), f"{text}.sampler.set_epoch({text}.sampler.epoch + 1)")
    else:
        edits.wrap(loader, f"{ranks}.whole")


def _relay(training: Training, edits: Edits, relay: cst.For) -> None:
    """An endless generator begins passes itself; who loops over another one has done so."""
    source = training.source
    if not any(isinstance(there, cst.While) for there in source.above(relay)):
        return
    for name in training.loader_names(relay.iter):
        text = source.code(name)
        edits.before(relay, f"{text}.sampler.set_epoch({text}.sampler.epoch + 1)")
        if not set(training.flows.holds(name, Kind.LOADER)) <= set(training.divided):
            edits.refuse(source.line(relay), "yields batches of a loader that is trained on, and of one that is not")


def _agree(training: Training, edits: Edits, loop: Loop, ranks: str) -> None:
    """What a loop that does not train has summed up is the same on all ranks, but for the last bits."""
    source = training.source
    if not isinstance(loop, cst.For):
        return
    sums = [node.target for node in source.all(cst.AugAssign, loop.body)]
    names = dict.fromkeys(source.code(node) for node in sums if isinstance(node, cst.Name | cst.Attribute))
    for name in names:
        edits.after(loop, f"{name} = {ranks}.agreed({name})")


def _look_at_size(training: Training, edits: Edits, size: cst.BaseExpression) -> None:
    """The size of a batch elsewhere in what trains: a tensor of so many rows does not fit a rank's part."""
    source = training.source
    text = source.code(size)
    if isinstance(size, cst.Integer):
        return
    for loop in training.loops:
        for call in source.all(cst.Call, source.statement(loop)):
            name = source.full_name(call.func)
            if name.startswith("torch.") and any(source.code(arg.value) == text for arg in call.args):
                edits.refuse(
                    source.line(call), f"`{text}` is the size of all ranks' parts; take that of the data, `x.size(0)`"
                )


def _seeds(source: Source, ranks: str) -> list[str]:
    """Ranks that nobody seeds agree on a seed, so that they split data and begin alike."""
    lines = []
    names = {source.full_name(call.func) for call in source.all(cst.Call)}
    seeded = any(name.rpartition(".")[2] in ("manual_seed", "seed_everything", "set_seed") for name in names)
    if not seeded:
        lines.append(f"torch.manual_seed({ranks}.agreed(torch.initial_seed()))")
    numpy = next((name for name, what in source.imported.items() if what == "numpy"), "")
    uses_numpy = any(name.startswith("numpy.random.") and "default_rng" not in name for name in names)
    if uses_numpy and "numpy.random.seed" not in names and numpy:
        lines.append(f"{numpy}.random.seed({ranks}.agreed({numpy}.random.randint(2**31)))")
    if any(name.startswith("random.") and name[7:8].islower() for name in names) and "random.seed" not in names:
        lines.append(f"random.seed({ranks}.agreed(random.getrandbits(32)))")
    return lines if source.imported.get("torch") == "torch" else [line for line in lines if "torch." not in line[:6]]
