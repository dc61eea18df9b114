"""Libraries that take long to load, loaded when an arm needs them for the first time: between two iterations."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from sirtaki.errors import TuningError


def require(arm: str, package: str, distribution: str) -> None:
    """Says at once what would be missing later.

    Raises:
        TuningError: the package is not installed.
    """
    if find_spec(package) is None:
        raise TuningError(f"the {arm} arm needs {distribution}: pip install {distribution}, or leave the arm out")


@cache
def import_late(*names: str) -> tuple[ModuleType, ...]:
    """The modules. What they import may keep the errors of imports that failed, and with these the frames that led to
    them: so they are imported on a stack of its own, and not on the user's with his model in it.
    """
    with ThreadPoolExecutor(max_workers=1) as stack:
        return tuple(stack.map(import_module, names))
