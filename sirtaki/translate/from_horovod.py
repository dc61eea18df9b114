"""From Horovod: the import."""

from __future__ import annotations

import libcst as cst

from .edits import Edits
from .source import Source, dotted, walk


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
        edits.refuse(source.line(node), f"`{package}` has no counterpart: Sirtaki speaks PyTorch")
