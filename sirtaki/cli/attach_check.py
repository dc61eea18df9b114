"""Checks of `sirtaki doctor` whether Sirtaki would attach the models of an unmodified script (SIRTAKI_ATTACH=auto)."""

import ast
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sirtaki.attach import VALUE, VARIABLE, is_wanted
from sirtaki.errors import ConfigError

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

WRAPPERS = {
    "torch.nn.parallel.DistributedDataParallel": "DDP",
    "torch.nn.parallel.distributed.DistributedDataParallel": "DDP",
    "torch.distributed.fsdp.fully_shard": "FSDP2",
    "torch.distributed._composable.fsdp.fully_shard": "FSDP2",
    "torch.distributed._composable.replicate.replicate": "replicate()",
    "torch.distributed._composable.replicate": "replicate()",
    "torch.distributed._composable.replicate_with_fsdp.replicate": "replicate()",
    "accelerate.Accelerator": "DDP or FSDP2 of Accelerate",
    "transformers.Trainer": "DDP of Hugging Face Trainer",
    "lightning.Trainer": "DDP of Lightning",
    "lightning.pytorch.Trainer": "DDP of Lightning",
    "pytorch_lightning.Trainer": "DDP of Lightning",
}
"""{full name of a function or class: description}, for calls that let PyTorch reduce a model's gradients"""

FSDP1 = ("torch.distributed.fsdp.FullyShardedDataParallel",)

REFUSED_ARGUMENTS = {
    "mixed_precision": "use torch.autocast instead",
    "delay_all_reduce_named_params": "remove this argument",
}
"""{argument of DDP with which a model is not attached: what the user can do}"""

HOOKS = ("register_comm_hook", "_register_builtin_comm_hook")


class ScriptFinding(NamedTuple):
    """A line of a script that decides whether Sirtaki attaches a model.

    Attributes:
        line: line number, from 1. 0 for the whole script.
        what: what the line does.
        obstacle: why the model is not attached; "" if it is attached.
        remedy: what the user can do.
    """

    line: int
    what: str
    obstacle: str = ""
    remedy: str = ""


def environment_obstacle() -> tuple[str, str]:
    """Return why `import torch` does not attach models in this environment, and a remedy.

    Both are empty if it attaches them.
    """
    start = "start the script with `sirtakirun --attach` or `python -m sirtaki.attach`"
    if (version := importlib.metadata.version("torch")).startswith("2.4."):
        return f"`import torch` of PyTorch {version} calls no entry points; that of 2.5 and newer does", start
    names = {entry.name for entry in importlib.metadata.entry_points(group="torch.backends")}
    if "sirtaki" not in names:
        return "the entry point of Sirtaki is missing, so `import torch` does not call it", "reinstall sirtaki"
    if (autoload := os.environ.get(AUTOLOAD, "1")) != "1":  # This is the same test as in PyTorch.
        return (
            f"{AUTOLOAD}={autoload} keeps `import torch` from calling Sirtaki",
            f"{start}, or unset the variable",
        )
    return "", ""


def describe_variable() -> str:
    """Describe what the current value of SIRTAKI_ATTACH does."""
    if is_wanted():
        return f"{VARIABLE}={VALUE}: DDP and FSDP2 models of all scripts are attached"
    return f"off; {VARIABLE}={VALUE} attaches the DDP and FSDP2 models of unmodified scripts"


def check_script(path: str) -> list[ScriptFinding]:
    """Find the lines of a script that decide whether Sirtaki attaches its models.

    The script is read, but not run.

    Raises:
        ConfigError: the file cannot be read, or is not Python.
    """
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except OSError as err:
        raise ConfigError(f"the script {path} cannot be read: {err.strerror or err}") from err
    except (SyntaxError, ValueError) as err:
        raise ConfigError(f"{path} is not a Python script: {err}") from err
    found = sorted(_findings(tree, _imported_names(tree)))
    if not found:
        found = [
            ScriptFinding(
                0,
                "no model is wrapped here",
                "the script neither calls DDP, fully_shard() or replicate(), nor a framework that is known to do so",
                "if a module that it imports does so, check that module, or run the script and read the log",
            )
        ]
    return found


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the full name of each name that the script imports."""
    names = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                names[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def _findings(tree: ast.AST, names: dict[str, str]) -> Iterator[ScriptFinding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _full_name(node.func, names)
        if called in FSDP1:
            yield ScriptFinding(
                node.lineno, "FSDP1", "FSDP1 is not supported", "shard the model with fully_shard() (FSDP2)"
            )
        elif called in WRAPPERS:
            refused = {each.arg for each in node.keywords if each.arg in REFUSED_ARGUMENTS}
            if WRAPPERS[called] == "DDP" and refused:
                argument = min(filter(None, refused))
                yield ScriptFinding(
                    node.lineno, "DDP", f"DDP({argument}=...) is not supported", REFUSED_ARGUMENTS[argument]
                )
            else:
                yield ScriptFinding(node.lineno, WRAPPERS[called])
        elif isinstance(node.func, ast.Attribute) and node.func.attr in HOOKS:
            yield ScriptFinding(
                node.lineno,
                f"{node.func.attr}()",
                "DDP reduces the gradients of a model with a communication hook",
                "remove the hook",
            )


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    """Return the full name of the function or class that is called; "" if it has no plain name."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])
