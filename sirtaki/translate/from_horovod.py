"""From Horovod: the import."""

from __future__ import annotations

import libcst as cst

from .edits import Edits
from .source import Source, dotted


def change_imports(source: Source, edits: Edits) -> None:
    """Collects the changes, and what stands in their way."""
    for node in source.all(cst.CSTNode):
        if isinstance(node, cst.ImportAlias) and dotted(node.name).split(".")[0] == "horovod":
            _change(source, edits, node, node.name)
        elif isinstance(node, cst.ImportFrom) and node.module is not None:
            if dotted(node.module).split(".")[0] == "horovod":
                _change(source, edits, node, node.module)


def _change(source: Source, edits: Edits, node: cst.CSTNode, name: cst.BaseExpression) -> None:
    package = dotted(name)
    if package == "horovod.torch" or package.startswith("horovod.torch.") or package == "horovod.run":
        edits.replace(name, package.replace("horovod", "sirtaki", 1))
    else:
        edits.refuse(source.line(node), f"`{package}` has no counterpart: Sirtaki speaks PyTorch")
