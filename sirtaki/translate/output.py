"""What a script prints, logs and writes: rank 0 does it, and all others wait where they read it."""

from __future__ import annotations

import libcst as cst

from .edits import Edits, keyword, with_more
from .flows import Flows, Kind
from .source import Source, argument, called_attribute

WRITES = {
    "torch.save", "pickle.dump", "json.dump", "yaml.dump", "joblib.dump", "numpy.save", "numpy.savez", "numpy.savetxt",
    "numpy.savez_compressed", "os.remove", "os.unlink", "os.rename", "os.replace", "os.rmdir", "torch.onnx.export",
    "torch.jit.save", "torchvision.utils.save_image", "safetensors.torch.save_file", "sys.stdout.write",
    "sys.stderr.write",
    "matplotlib.pyplot.savefig", "matplotlib.pyplot.show",
}  # fmt: skip
"""Calls that only rank 0 makes."""

WRITING_METHODS = {
    "savefig",
    "save_pretrained",
    "to_csv",
    "to_json",
    "write_text",
    "write_bytes",
    "unlink",
    "rmdir",
    "touch",
}
WRITING_PACKAGES = ("shutil.", "wandb.", "mlflow.")
FOLDERS = {"os.makedirs", "os.mkdir", "mkdir", "makedirs"}
READS = {"torch.load", "numpy.load", "json.load", "pickle.load", "joblib.load"}


class Output:
    """Keeps a script's output to rank 0."""

    def __init__(self, source: Source, flows: Flows, edits: Edits, *, hvd: str, ranks: str) -> None:
        """`hvd` and `ranks` are the names that `sirtaki.torch` and `sirtaki.torch.ranks` have in the script."""
        self._source, self._flows, self._edits, self._hvd, self._ranks = source, flows, edits, hvd, ranks
        self._writes = False

    def keep(self) -> None:
        """The whole script."""
        for call in self._source.all(cst.Call):
            name, method = self._source.full_name(call.func), called_attribute(call)
            if name in WRITES or name.startswith(WRITING_PACKAGES) or method in WRITING_METHODS:
                self._writes = self._writes or not name.startswith("sys.")
                self._on_root(call)
            elif name in FOLDERS or method == "mkdir":
                self._folder(call)
            elif name == "open" or method == "open":
                self._open(call)
            elif name.rpartition(".")[2] in ("tqdm", "trange"):
                self._bar(call)
            elif id(call) in self._flows.sites and self._flows.sites[id(call)].kind is Kind.WRITER:
                self._edits.wrap(call.func, f"{self._ranks}.on_root")
        for call in self._source.all(cst.Call):
            if self._writes and self._source.full_name(call.func) in READS:
                self._edits.before(self._source.statement(call), f"{self._hvd}.barrier()  # rank 0 may be writing it")

    @property
    def begins_with(self) -> list[str]:
        """What the script does at its beginning, so that others keep silent."""
        lines = []
        if "print" in self._source.names():
            lines.append(f"print = {self._ranks}.on_root(print)")
        if self._source.imports("logging"):
            lines.append(f"if {self._hvd}.rank() != 0:\n    logging.disable(logging.INFO)")
        return lines

    def _on_root(self, call: cst.Call) -> None:
        """A plain call into a block of rank 0's; one whose value is used, or that may communicate, by a function."""
        parent = self._source.parent(call)
        line = self._source.parent(parent) if isinstance(parent, cst.Expr) else None
        calls_own = any(self._flows.callees(inner) for inner in self._source.all(cst.Call, call))
        communicates = calls_own or self._edits.changes_in(call)
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 and not communicates:
            self._edits.put_into(line, f"if {self._hvd}.rank() == 0")
        else:
            self._edits.wrap(call.func, f"{self._ranks}.on_root")

    def _folder(self, call: cst.Call) -> None:
        if argument(call, "exist_ok") is None:
            self._on_root(call)

    def _open(self, call: cst.Call) -> None:
        """Ranks other than the first write into nothing."""
        receiver = call.func.value if isinstance(call.func, cst.Attribute) else None
        if isinstance(receiver, cst.Name) and receiver.value in self._source.imported:  # gzip.open
            receiver = None
        mode = argument(call, "mode", 1 if receiver is None else 0)
        text = "" if mode is None else self._source.code(mode).strip("\"'")
        if not set(text) & set("wax+"):
            return
        self._writes = True
        if receiver is not None:  # a pathlib.Path
            where = cst.parse_expression(f'{self._source.code(receiver)} if {self._hvd}.rank() == 0 else "/dev/null"')
            self._edits.change(call, lambda node: _opened(node, where))
        elif not call.args or call.args[0].keyword is not None:
            self._edits.refuse(self._source.line(call), f"all ranks would write: `{self._source.code(call)}`")
        else:
            path = self._source.code(call.args[0].value)
            self._edits.replace(call.args[0].value, f'{path} if {self._hvd}.rank() == 0 else "/dev/null"')

    def _bar(self, call: cst.Call) -> None:
        if argument(call, "disable") is None:
            silent = keyword("disable", f"{self._hvd}.rank() != 0")
            self._edits.change(call, lambda node: with_more(node, silent))


def _opened(call: cst.BaseExpression, where: cst.BaseExpression) -> cst.Call:
    """`open(where, …)` for `path.open(…)`."""
    assert isinstance(call, cst.Call)
    return call.with_changes(func=cst.Name("open"), args=[cst.Arg(where), *call.args])
