"""From DistributedDataParallel and torch.distributed: names for names, wrappers undone."""

from __future__ import annotations

import re

import libcst as cst

from .beginning import free_name
from .devices import undo_wrapper
from .edits import Edits, keyword, with_more
from .flows import Flows, Kind
from .optimizers import Optimizers
from .refusals import look_for_what_cannot_be
from .source import Source, argument, called_attribute
from .training import Training

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
            self._edits.refuse(self._source.line(call), f"use `{self._hvd}.SyncBatchNorm` where the model is made")

    def _of_package(self, call: cst.Call, name: str) -> None:
        hvd = self._hvd
        if argument(call, "group") is not None:
            self._edits.refuse(self._source.line(call), "groups of ranks are `process_set=` here")
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
            self._edits.refuse(self._source.line(call), f"has no counterpart that is sure: `{self._source.code(call)}`")

    def _all_reduce(self, call: cst.Call) -> None:
        op = argument(call, "op", 1)
        operation = "SUM" if op is None else self._source.code(op).rpartition(".")[2]
        if operation not in OPERATIONS or argument(call, "async_op") is not None:
            self._edits.refuse(self._source.line(call), f"has no counterpart that is sure: `{self._source.code(call)}`")
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
            self._edits.note(
                self._source.line(call), "nobody calls this sampler's `set_epoch`: all epochs have one order"
            )

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
            self._edits.refuse(self._source.line(node), "sets what the launcher sets")
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
            brought = [self._source.imported.get(_bound(alias), "") for alias in node.names]
            if not set(brought) <= gone or (
                "torch.distributed" not in brought and "DistributedDataParallel" not in str(brought)
            ):
                continue
            if not placed:
                self._edits.after(statement, f"import sirtaki.torch as {self._hvd}")
                placed = True
            self._edits.remove(statement)
        if not placed:
            self._edits.after(self._first_import(), f"import sirtaki.torch as {self._hvd}")
        if "no_sync" in self._source.text and "contextlib" not in self._source.imported:
            self._edits.before(self._first_import(), "import contextlib")

    def _first_import(self) -> cst.BaseStatement:
        first = next(statement for statement in self._source.module.body if _is_import(statement))
        assert isinstance(first, cst.BaseStatement)
        return first


def _bound(alias: cst.ImportAlias) -> str:
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return alias.evaluated_name


def _is_import(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Import | cst.ImportFrom)
        and (not isinstance(statement.body[0], cst.ImportFrom) or "__future__" not in cst.Module([statement]).code)
    )
