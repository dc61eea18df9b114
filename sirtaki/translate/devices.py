"""Each rank takes the device of its number on its host."""

from __future__ import annotations

import re

import libcst as cst

from .edits import Edits
from .flows import Flows, Kind
from .source import Source, called_attribute


def place(source: Source, flows: Flows, edits: Edits, *, hvd: str) -> list[str]:
    """Edits what names a device.

    Returns:
        What the script does at its beginning.
    """
    for text in source.all(cst.SimpleString):
        if re.fullmatch(r"""["']cuda:0["']""", text.value):
            edits.replace(text, f'f"cuda:{{{hvd}.local_rank()}}"')
        elif re.fullmatch(r"""["']cuda:\d+["']""", text.value):
            edits.refuse(source.line(text), f"names one device for all ranks: {text.value}")
    for call in source.all(cst.Call):
        numbered = called_attribute(call) == "cuda" and call.args and isinstance(call.args[0].value, cst.Integer)
        if numbered or source.full_name(call.func) == "torch.cuda.set_device":
            edits.replace(call.args[0].value, f"{hvd}.local_rank()")
    for node in source.all(cst.Subscript):
        visible = source.full_name(node.value) == "os.environ" and "CUDA_VISIBLE_DEVICES" in source.code(node)
        if visible and isinstance(source.parent(node), cst.AssignTarget):
            edits.refuse(
                source.line(node), "chooses the devices that all ranks see: leave that to who starts the script"
            )
    for site in flows.made(Kind.WRAPPER):
        if site.name.endswith(".DataParallel"):
            undo_wrapper(source, flows, edits, site.call)
    uses_cuda = source.imported.get("torch") == "torch" and "cuda" in source.text
    return [f"if torch.cuda.is_available():\n    torch.cuda.set_device({hvd}.local_rank())"] if uses_cuda else []


def undo_wrapper(source: Source, flows: Flows, edits: Edits, call: cst.Call) -> None:
    """`Wrapper(model, …)` becomes `model`, and `wrapped.module` what it was."""
    inner = call.args[0].value
    assign = source.parent(call)
    same = isinstance(assign, cst.Assign) and len(assign.targets) == 1
    if same and source.code(assign.targets[0].target) == source.code(inner):  # type: ignore[attr-defined]  # an Assign
        edits.remove(source.statement(call))
    else:
        edits.change(call, lambda node: node.args[0].value)  # type: ignore[attr-defined]  # a call
    for node in source.all(cst.Attribute):
        wrapped = node.attr.value == "module" and flows.holds(node.value, Kind.WRAPPER)
        if wrapped and not isinstance(source.parent(node), cst.AssignTarget):
            edits.change(node, lambda there: there.value)  # type: ignore[attr-defined]  # an attribute
    edits.note(source.line(call), "the model is not wrapped: its states have no `module.` before each name any more")
