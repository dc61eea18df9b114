"""Import Sirtaki's modules under Horovod's names: `horovod.torch` is the same module object as `sirtaki.torch`.

The shim package contains only the name. To use it without `sirtakirun`:

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
"""Folder that provides `import horovod` if it is first on PYTHONPATH."""

# Packages of the shim itself.
_OWN = ("horovod.common", "horovod.runner")

# Modules outside `horovod.torch`, and their counterparts.
_ELSEWHERE = {
    "horovod.common.process_sets": "sirtaki.torch.process_sets",
    "horovod.common.exceptions": "sirtaki.torch.exceptions",
    "horovod.common.util": "sirtaki.torch.basics",
    "horovod.common.basics": "sirtaki.torch.basics",
    "horovod.ray.runner": "sirtaki.integrations.ray.executor",
    "horovod.ray.ray_logger": "sirtaki.integrations.ray.ray_logger",
}


class _Alias(Loader):
    """Loader that puts an existing module under a second name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None. The import system creates an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module before it is used. The target's own spec is unchanged."""
        sys.modules[module.__name__] = importlib.import_module(self.target)


class HorovodFinder(MetaPathFinder):
    """Finds `horovod.…` modules in Sirtaki, and raises if there is no counterpart."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the alias `fullname`. None for other modules.

        Raises:
            ModuleNotFoundError: Sirtaki has no counterpart.
        """
        if not fullname.startswith("horovod.") or fullname in _OWN:
            return None
        counterpart = _ELSEWHERE.get(fullname)
        if counterpart is None and fullname.startswith(("horovod.torch", "horovod.ray")):
            counterpart = fullname.replace("horovod", "sirtaki", 1)
        if counterpart is None or not _exists(counterpart):
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in Sirtaki, which stands in for horovod.torch and horovod.ray",
                name=fullname,
            )
        return ModuleSpec(fullname, _Alias(counterpart), is_package=True)


def is_installed() -> bool:
    """Return whether `import horovod.…` imports Sirtaki in this process."""
    return any(isinstance(finder, HorovodFinder) for finder in sys.meta_path)


def install() -> None:
    """Make `import horovod.…` import Sirtaki in this process. Idempotent."""
    if not is_installed():
        # First, because later finders would load modules of `horovod.torch` a second time from `sirtaki.torch`'s path.
        sys.meta_path.insert(0, HorovodFinder())


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    print(SHIM)
