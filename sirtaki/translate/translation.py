"""From a script of one process, of DistributedDataParallel's or of Horovod's to one of Sirtaki's."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

import libcst as cst

from sirtaki.errors import TranslationError

from .changes import (
    HandCut,
    Optimizers,
    Output,
    begin,
    free_name,
    import_lines,
    look_for_what_cannot_be,
    place,
    undo_wrapper,
)
from .meaning import Loop, RankValues, Training
from .source import Edits, Flows, Kind, Source, argument, bound_name, called_attribute, dotted, keyword, walk, with_more

CALLS = {
    "get_rank": "rank",
    "get_world_size": "size",
    "is_initialized": "is_initialized",
    "barrier": "barrier",
    "destroy_process_group": "shutdown",
}
"""Functions of torch.distributed without arguments that matter, and ours."""

OPERATIONS = {"SUM": "Sum", "AVG": "Average", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product"}
VARIABLES = {
    "RANK": "rank",
    "WORLD_SIZE": "size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_size",
}
PLACES = (("num_replicas", "size"), ("rank", "rank"))
"""What a sampler is given behind its data, and our functions."""

PACKAGE = "torch.distributed."


class FromDdp:
    """The changes of one script."""

    def __init__(self, source: Source, edits: Edits) -> None:
        self._source, self._edits, self._hvd = source, edits, free_name(source, "hvd")
        self._flows = Flows(source)
        self._training = Training(self._flows)

    def change(self) -> None:
        """Collects them, and what stands in their way."""
        look_for_what_cannot_be(self._training, self._edits)
        if self._edits.obstacles:
            return
        for call in self._source.all(cst.Call):
            self._call(call)
        for node in self._source.all(cst.Subscript):
            self._variable(node, self._source.code(node.slice[0].slice))
        for site in self._flows.made(Kind.WRAPPER):
            undo_wrapper(self._source, self._flows, self._edits, site.call)
        Optimizers(self._training, self._edits, hvd=self._hvd).distribute({})
        self._imports()

    def _call(self, call: cst.Call) -> None:
        name = self._source.full_name(call.func)
        method = called_attribute(call)
        if name == "torch.utils.data.distributed.DistributedSampler" or name == "torch.utils.data.DistributedSampler":
            self._sampler(call)
        elif method == "no_sync":
            self._edits.replace(call, "contextlib.nullcontext()")
        elif name in ("os.environ.get", "os.getenv"):
            if call.args and re.fullmatch(r"""["'](\w+)["']""", self._source.code(call.args[0].value)):
                self._variable(call, self._source.code(call.args[0].value))
        elif name.startswith(PACKAGE):
            self._of_package(call, name.removeprefix(PACKAGE))
        elif name.endswith("convert_sync_batchnorm"):
            self._edits.refuse(call, f"use `{self._hvd}.SyncBatchNorm` where the model is made")

    def _of_package(self, call: cst.Call, name: str) -> None:
        hvd = self._hvd
        if argument(call, "group") is not None:
            self._edits.refuse(call, "groups of ranks are `process_set=` here")
        elif name == "init_process_group":
            self._edits.replace(call, f"{hvd}.init()")
        elif name in CALLS:
            self._edits.replace(call, f"{hvd}.{CALLS[name]}()")
        elif name == "all_reduce" and call.args:
            self._all_reduce(call)
        elif name == "broadcast" and len(call.args) > 1:
            tensor, root = (
                self._source.code(argument(call, key, at) or call) for key, at in (("tensor", 0), ("src", 1))
            )
            self._edits.replace(call, f"{hvd}.broadcast_({tensor}, root_rank={root})")
        else:
            self._edits.refuse(call, f"has no counterpart that is sure: `{self._source.code(call)}`")

    def _all_reduce(self, call: cst.Call) -> None:
        op = argument(call, "op", 1)
        operation = "SUM" if op is None else self._source.code(op).rpartition(".")[2]
        if operation not in OPERATIONS or argument(call, "async_op") is not None:
            self._edits.refuse(call, f"has no counterpart that is sure: `{self._source.code(call)}`")
            return
        tensor = self._source.code(call.args[0].value)
        self._edits.replace(call, f"{self._hvd}.allreduce_({tensor}, op={self._hvd}.{OPERATIONS[operation]})")

    def _sampler(self, call: cst.Call) -> None:
        for position, (name, function) in enumerate(PLACES, start=1):
            given = argument(call, name, position)
            if given is not None:
                self._edits.replace(given, f"{self._hvd}.{function}()")
        if argument(call, "num_replicas", 1) is None:
            added = [keyword(name, f"{self._hvd}.{function}()") for name, function in PLACES]
            self._edits.change(call, lambda node: with_more(node, *added))
        if "set_epoch" not in self._source.text:
            self._edits.note(call, "nobody calls this sampler's `set_epoch`: all epochs have one order")

    def _variable(self, node: cst.BaseExpression, text: str) -> None:
        """`int(os.environ["LOCAL_RANK"])`."""
        name = text.strip("\"'")
        if name not in VARIABLES or (
            "environ" not in self._source.code(node) and "getenv" not in self._source.code(node)
        ):
            return
        around = self._source.parent(self._source.parent(node))
        whole = node
        if isinstance(around, cst.Call) and self._source.code(around.func) == "int":
            whole = around
        if isinstance(self._source.parent(node), cst.AssignTarget):
            self._edits.refuse(node, "sets what the launcher sets")
            return
        self._edits.replace(whole, f"{self._hvd}.{VARIABLES[name]}()")

    def _imports(self) -> None:
        """Ours in the place of torch.distributed's and the wrapper's."""
        gone, placed = {"torch.distributed", "torch.nn.parallel.DistributedDataParallel"}, False
        for statement in self._source.module.body:
            if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
                continue
            node = statement.body[0]
            if not isinstance(node, cst.Import | cst.ImportFrom) or isinstance(node.names, cst.ImportStar):
                continue
            brought = [self._source.imported.get(bound_name(alias), "") for alias in node.names]
            if not set(brought) <= gone or (
                "torch.distributed" not in brought and "DistributedDataParallel" not in str(brought)
            ):
                continue
            if not placed:
                self._edits.after(statement, *import_lines(self._source, hvd=self._hvd))
                placed = True
            self._edits.remove(statement)
        if not placed:
            self._edits.after(self._first_import(), *import_lines(self._source, hvd=self._hvd))
        if "no_sync" in self._source.text and "contextlib" not in self._source.imported:
            self._edits.before(self._first_import(), "import contextlib")

    def _first_import(self) -> cst.BaseStatement:
        first = next(statement for statement in self._source.module.body if _is_import(statement))
        assert isinstance(first, cst.BaseStatement)
        return first


def _is_import(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Import | cst.ImportFrom)
        and (not isinstance(statement.body[0], cst.ImportFrom) or "__future__" not in cst.Module([statement]).code)
    )


def change_imports(source: Source, edits: Edits) -> None:
    """Collects the changes, and what stands in their way."""
    for node in walk(source.module):
        if isinstance(node, cst.ImportAlias) and _is_horovod(node.name):
            _change(source, edits, node, node.name)
        elif isinstance(node, cst.ImportFrom) and node.module is not None and _is_horovod(node.module):
            _change(source, edits, node, node.module)


def _is_horovod(name: cst.BaseExpression) -> bool:
    return dotted(name).split(".")[0] == "horovod"


def _change(source: Source, edits: Edits, node: cst.CSTNode, name: cst.BaseExpression) -> None:
    package = dotted(name)
    if package == "horovod.torch" or package.startswith("horovod.torch.") or package == "horovod.run":
        edits.replace(name, package.replace("horovod", "sirtaki", 1))
    else:
        edits.refuse(node, f"`{package}` has no counterpart: Sirtaki speaks PyTorch")


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
    for loop in training.other_loops:
        _agree(training, edits, loop, ranks)
    if training.other_loops:
        edits.note(0, "loops that do not train see all of their data on every rank")
    values.follow()
    Optimizers(training, edits, hvd=hvd).distribute(values.losses)
    output = Output(source, flows, edits, hvd=hvd, ranks=ranks)
    output.keep()
    lines = [f"{hvd}.init()", *place(source, flows, edits, hvd=hvd), *output.begins_with, *_seeds(source, ranks)]
    begin(source, edits, imports=import_lines(source, hvd=hvd, ranks=ranks), lines=lines)
    if "BatchNorm" in source.text:
        edits.note(0, f"batch norm sees a rank's part of a batch; `{hvd}.SyncBatchNorm` sees all of it")


def _divide(training: Training, edits: Edits, ranks: str) -> None:
    source = training.source
    for site in training.divided:
        call = site.call
        if argument(call, "batch_sampler", 5) is not None:
            edits.refuse(call, "the loader has a batch sampler of its own, which cannot be divided")
        size = argument(call, "batch_size", 1)
        starred = any(arg.star for arg in call.args)
        if (size is None and not starred) or (size is not None and source.code(size) in ("1", "None")):
            edits.refuse(call, "batches of one sample cannot be divided among ranks")
        edits.wrap(call, f"{ranks}.divided({{it}})")
        if size is not None:
            _look_at_size(training, edits, size)
    for loop in training.loops:
        for name in training.loader_names(loop.iter):
            if name not in training.flows.sites:
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
            if training.is_divided(name) and name not in training.flows.sites:
                edits.wrap(name, f"{ranks}.whole({{it}})")
    edits.note(0, "each batch is divided among the ranks, which must divide its size; learning rates stay as they are")


def _begin_pass(training: Training, edits: Edits, call: cst.Call, ranks: str) -> None:
    loader, source = call.args[0].value, training.source
    if not training.is_divided(loader):
        return
    is_read = any(source.contains(read, call) or training.flows.values(read.args[0].value) for read in training.reads)
    if is_read:
        text = source.code(loader)
        edits.before(source.statement(call), f"{text}.sampler.set_epoch({text}.sampler.epoch + 1)")
    else:
        edits.wrap(loader, f"{ranks}.whole({{it}})")


def _relay(training: Training, edits: Edits, relay: cst.For) -> None:
    """An endless generator begins passes itself; who loops over another one has done so."""
    source = training.source
    if not any(isinstance(there, cst.While) for there in source.above(relay)):
        return
    for name in training.loader_names(relay.iter):
        text = source.code(name)
        edits.before(relay, f"{text}.sampler.set_epoch({text}.sampler.epoch + 1)")
        if not set(training.flows.holds(name, Kind.LOADER)) <= set(training.divided):
            edits.refuse(relay, "yields batches of a loader that is trained on, and of one that is not")


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
                edits.refuse(call, f"`{text}` is the size of all ranks' parts; take that of the data, `x.size(0)`")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What a script becomes.

    Attributes:
        before: its text.
        after: the text that trains on several ranks; the same where it does so already.
        notes: (line, text) of what a reader should know; line 0 is the whole script.
    """

    before: str
    after: str
    notes: tuple[tuple[int, str], ...]

    def diff(self, name: str) -> str:
        """The changes, as a unified diff; empty if there are none."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, fromfile=name, tofile=name))


def translate(text: str) -> Translation:
    """Turns a script of one process, for DistributedDataParallel or for Horovod into one for Sirtaki.

    Raises:
        TranslationError: it holds what is not understood.
    """
    source = Source(text)
    edits = Edits(source)
    if source.imports("sirtaki"):
        return Translation(before=text, after=text, notes=((0, "it uses Sirtaki already"),))
    if source.imports("horovod"):
        source = Source(text, as_written=True)
        edits = Edits(source)
        change_imports(source, edits)
    elif source.imports("torch.distributed") or "DistributedDataParallel" in text:
        FromDdp(source, edits).change()
    else:
        distribute(source, edits)
    if edits.obstacles:
        raise TranslationError.of(edits.obstacles)
    after = edits.applied(source.module)
    compile(after, "translated", "exec", dont_inherit=True)
    return Translation(before=text, after=after, notes=tuple(sorted(edits.notes)))
