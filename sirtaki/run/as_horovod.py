"""Gives Sirtaki's modules under Horovod's names: `horovod.torch` is `sirtaki.torch`, the same module object.

The shim package holds nothing but the name. Where no `sirtakirun` starts the script,

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
"""The folder that gives `import horovod` when it comes first on PYTHONPATH."""

# Packages of the shim itself.
_OWN = ("horovod.common", "horovod.runner")

# Horovod's modules outside `horovod.torch` lie elsewhere here.
_ELSEWHERE = {
    "horovod.common.process_sets": "sirtaki.torch.process_sets",
    "horovod.common.exceptions": "sirtaki.torch.exceptions",
    "horovod.common.util": "sirtaki.torch.basics",
    "horovod.common.basics": "sirtaki.torch.basics",
    "horovod.ray.runner": "sirtaki.integrations.ray.executor",
    "horovod.ray.ray_logger": "sirtaki.integrations.ray.ray_logger",
}


class _Alias(Loader):
    """Puts an existing module under a second name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """The import system makes an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replaces it before anyone has seen it; the target's own spec stays as it is."""
        sys.modules[module.__name__] = importlib.import_module(self.target)


class HorovodFinder(MetaPathFinder):
    """Finds `horovod.…` in Sirtaki, and says so where there is no counterpart."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The alias of `fullname`; None for what is not Horovod's.

        Raises:
            ModuleNotFoundError: this part of Horovod is not there.
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
    """`import horovod.…` gives Sirtaki in this process."""
    return any(isinstance(finder, HorovodFinder) for finder in sys.meta_path)


def install() -> None:
    """From now on `import horovod.…` gives Sirtaki in this process; again is harmless."""
    if not is_installed():
        # First, since `horovod.torch` has `sirtaki.torch`'s path, where others would load its modules a second time.
        sys.meta_path.insert(0, HorovodFinder())


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    print(SHIM)
