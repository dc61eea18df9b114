"""Attach Sirtaki to the DDP and FSDP2 models of unmodified scripts (`SIRTAKI_ATTACH=auto`).

    SIRTAKI_ATTACH=auto torchrun --nproc-per-node 4 train.py
    sirtakirun --attach -np 4 python train.py
    torchrun --nproc-per-node 4 -m sirtaki.attach train.py

`import torch` calls `sirtaki.torch_backend.register` (entry point `torch.backends`). With the variable set to `auto`,
`register` calls `install`. It registers two hooks, and imports nothing else of Sirtaki:

    DDP    PyTorch calls a hook whenever a module gets a submodule. DDP's constructor sets `self.module`.
    FSDP2  finds out in the first forward pass which module is the root (`FSDPState._lazy_init`). The method is wrapped
           once PyTorch has imported its module.

The first such model imports `sirtaki.torch.auto_attach`, which attaches the model after its first backward pass.

Without `SIRTAKI_ATTACH`, a setting such as `SIRTAKI_TRIAL_LOG` has no effect on an unmodified script. `report_unused`
registers the same hooks, and rank 0 prints a line about such settings at its end.

If PyTorch does not call entry points (`TORCH_DEVICE_BACKEND_AUTOLOAD=0`), `sirtakirun --attach` and
`python -m sirtaki.attach` call `register` themselves.
"""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE, VALUE = "SIRTAKI_ATTACH", "auto"

ATTACHER = "sirtaki.torch.auto_attach"
"""Module that attaches models. Imported by name when the first model is created, because its imports take long."""

FSDP2_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"

USAGE = "usage: python -m sirtaki.attach {script.py | -m module} [arguments]"

_installed = False

_unused: _UnusedSettings | None = None
"""Set by `report_unused`: it is told of new models instead of the attacher."""


def is_wanted() -> bool:
    """Return whether the environment variable asks for attaching the models of unmodified scripts."""
    return os.environ.get(VARIABLE, "").strip().lower() == VALUE


def install() -> None:
    """Register hooks through which PyTorch reports new DDP and FSDP2 models, so that Sirtaki attaches them. Idempotent.

    Not collective. Called after `import torch`.
    """
    global _unused
    import torch

    _unused = None
    # Several NCCL communicators require this variable. NCCL reads it at the script's first collective, which comes
    # before the first model, and so before `import sirtaki.torch`, which sets it too.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    _register_hooks()


def report_unused(names: Sequence[str]) -> None:
    """Let rank 0 print at its end which settings had no effect because the script trained without Sirtaki.

    Idempotent. Not collective. The other ranks print nothing.

    Args:
        names: environment variables of these settings.
    """
    global _unused
    if _installed:
        return
    _unused = _UnusedSettings(names)
    _register_hooks()


def _register_hooks() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    from torch.nn.modules.module import register_module_module_registration_hook

    register_module_module_registration_hook(_on_submodule)
    _after_import(FSDP2_STATE, _wrap_lazy_init)


class _UnusedSettings:
    """Settings that have no effect if this process trains a model without Sirtaki."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._seen = names, False

    def watch(self, *_: object) -> None:
        """Note that the script has created a DDP or FSDP2 model."""
        if not self._seen:
            self._seen = True
            # Ask the process group, because a launcher's RANK may be that of the node.
            if sys.modules["torch.distributed"].get_rank() == 0:
                from sirtaki.machine import at_exit

                at_exit(self._print)

    watch_sharded = watch

    def log_fsdp1(self) -> None:
        """Do nothing: Sirtaki does not support FSDP1."""

    def _print(self) -> None:
        if "sirtaki.torch" not in sys.modules:
            print(
                f"sirtaki: {', '.join(self._names)} had no effect, because the script did not use Sirtaki; "
                f"set {VARIABLE}={VALUE} on all ranks to attach its DDP and FSDP2 models",
                file=sys.__stderr__,
            )


def install_with_torch() -> None:
    """Call `install` as soon as the script imports PyTorch, also if PyTorch calls no entry points."""
    _after_import("torch", lambda _: importlib.import_module("sirtaki.torch_backend").register())


def _attacher() -> Any:  # The return type is Any, because the module is imported by name.
    return _unused or importlib.import_module(ATTACHER)


def _on_submodule(module: Any, name: str, inside: Any) -> None:
    """Report a new DDP model, or a new FSDP1 model, to the module that attaches models. Global hook of PyTorch.

    Never raises.
    """
    if inside is None or name not in ("module", "_fsdp_wrapped_module"):
        return
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    try:
        if name == "module" and distributed is not None and isinstance(module, distributed.DistributedDataParallel):
            _attacher().watch(module, inside)
        elif name == "_fsdp_wrapped_module" and type(module).__name__ == "FullyShardedDataParallel":
            _attacher().log_fsdp1()
    except Exception as err:
        # Print the error instead of raising it, because PyTorch can train the model without Sirtaki.
        _print_failure("DDP", err)


def _wrap_lazy_init(module: ModuleType) -> None:
    """Wrap FSDP2's lazy initialisation, so that each root module is reported when its first forward pass begins.

    Args:
        module: PyTorch's module that defines `FSDPState`.
    """
    state_class: Any = module.FSDPState
    lazy_init = state_class._lazy_init

    def _lazy_init(self: Any) -> None:
        is_first = self._is_root is None
        lazy_init(self)
        if is_first:
            try:
                _attacher().watch_sharded(self._modules[0])
            except Exception as err:
                # Print the error instead of raising it, because PyTorch can train the model without Sirtaki.
                _print_failure("FSDP2", err)

    state_class._lazy_init = _lazy_init


def _print_failure(what: str, err: Exception) -> None:
    """Print why models are not attached. Sirtaki's log cannot be used, because it may not be set up yet."""
    reason = f"{type(err).__name__}: {err}"
    print(f"sirtaki: {VARIABLE}={VALUE} has no effect on models of {what}, because of {reason}", file=sys.__stderr__)


def _after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module `name` once it has been imported, or now if it has been imported already."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import finder that calls a function once, after a module has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find the module by the other finders of `sys.meta_path`. Make its loader call `then` after loading it."""
        if name != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        load, then = spec.loader.exec_module, self._then

        def exec_module(module: ModuleType) -> None:
            load(module)
            # Remove this finder only after an import, because `importlib.util.find_spec` calls it without importing.
            sys.meta_path.remove(self)
            try:
                then(module)
            except Exception as err:
                # Print the error instead of raising it, because the script's import must not fail.
                _print_failure(name, err)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main() -> None:
    """Run the script or module that the command line names, and attach its models."""
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help") or command == ["-m"]:
        print(USAGE)
        print("\nRun a training script, and attach Sirtaki to its DDP and FSDP2 models (SIRTAKI_ATTACH=auto).")
        print("\n  torchrun --nproc-per-node 4 -m sirtaki.attach train.py --epochs 2")
        sys.exit(0 if command[:1] in (["-h"], ["--help"]) else 2)
    os.environ[VARIABLE] = VALUE
    # Import this module a second time, under its name, because the script will replace the module `__main__`.
    own = importlib.import_module("sirtaki.attach")
    own.install_with_torch()
    importlib.import_module("sirtaki.run.rank").run_python(command)


if __name__ == "__main__":
    main()
