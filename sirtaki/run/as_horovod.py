"""Import Sirtaki's modules under Horovod's names: `horovod.torch` is the same module object as `sirtaki.torch`.

The folder `shim` contains a small package named `horovod`, which imports this module. To use it without `sirtakirun`:

    PYTHONPATH=$(python -m sirtaki.run.as_horovod) python train.py
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

SHIM = Path(__file__).parent / "shim"
"""Folder that makes `import horovod` import Sirtaki if it is first on PYTHONPATH."""

# Packages that Python imports from the folder `shim`. This module does not map them to Sirtaki modules.
_OWN = ("horovod.common", "horovod.runner")

# Horovod's modules outside `horovod.torch`, and Sirtaki's modules that replace them.
_ELSEWHERE = {
    "horovod.common.process_sets": "sirtaki.torch.process_sets",
    "horovod.common.exceptions": "sirtaki.torch.exceptions",
    "horovod.common.util": "sirtaki.torch.basics",
    "horovod.common.basics": "sirtaki.torch.basics",
    "horovod.ray.runner": "sirtaki.integrations.ray.executor",
    "horovod.ray.ray_logger": "sirtaki.integrations.ray.ray_logger",
}


class _Alias(Loader):
    """Loader that registers an existing Sirtaki module under its Horovod name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that the import system creates an empty module. `exec_module` replaces that module."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module in `sys.modules` by Sirtaki's module, whose spec stays unchanged."""
        sys.modules[module.__name__] = importlib.import_module(self.target)


class HorovodFinder(MetaPathFinder):
    """Finder that maps `horovod.…` modules to Sirtaki modules, and raises for modules that Sirtaki does not have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that makes `fullname` an alias of a Sirtaki module. None if `fullname` is not under `horovod`.

        Raises:
            ModuleNotFoundError: Sirtaki has no module for this Horovod module.
        """
        if not fullname.startswith("horovod.") or fullname in _OWN:
            return None
        counterpart = _ELSEWHERE.get(fullname)
        if counterpart is None and fullname.startswith(("horovod.torch", "horovod.ray")):
            counterpart = fullname.replace("horovod", "sirtaki", 1)
        if counterpart is None or not _exists(counterpart):
            raise ModuleNotFoundError(
                f"the import of {fullname} failed, because Sirtaki replaces Horovod in this process and has only the "
                "modules horovod.torch and horovod.ray; remove this import, or run the job without --as-horovod",
                name=fullname,
            )
        return ModuleSpec(fullname, _Alias(counterpart), is_package=True)


def is_installed() -> bool:
    """Return whether `import horovod.…` imports Sirtaki in this process."""
    return any(isinstance(finder, HorovodFinder) for finder in sys.meta_path)


def install() -> None:
    """Make `import horovod.…` import Sirtaki in this process. Idempotent."""
    if not is_installed():
        # Insert the finder first. Otherwise other finders would load modules of `horovod.torch` a second time, from
        # `sirtaki.torch`'s path.
        sys.meta_path.insert(0, HorovodFinder())


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    print(SHIM)
