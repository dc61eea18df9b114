"""A function call that goes to ranks through a folder of pickles: `python -m sirtaki.run.call FOLDER` makes it."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sirtaki.errors import LaunchError

_CALL = "call.pickle"


def leave_call(folder: Path, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Writes the call for the ranks."""
    (folder / _CALL).write_bytes(_pickler().dumps((func, tuple(args), dict(kwargs))))


def answer_call(folder: Path, rank: int) -> None:
    """On a rank: makes the call and leaves its result."""
    func, args, kwargs = pickle.loads((folder / _CALL).read_bytes())
    result = func(*args, **kwargs)
    (folder / f"result.{rank}").write_bytes(_pickler().dumps(result))


def take_result(folder: Path, rank: int) -> Any:  # Any: what the user's function returned
    """What the call returned on `rank`.

    Raises:
        LaunchError: nothing is there, since that rank's host has another folder of this name.
    """
    try:
        return pickle.loads((folder / f"result.{rank}").read_bytes())
    except OSError as err:
        raise LaunchError(
            f"there is no result of rank {rank} in {folder}; with ranks on other hosts set TMPDIR to a folder "
            "that all of them share"
        ) from err


def _pickler() -> ModuleType:
    """Takes lambdas and functions of `__main__` too where cloudpickle is there; pickle reads what either wrote."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


if __name__ == "__main__":
    answer_call(Path(sys.argv[1]), int(os.environ["HOROVOD_RANK"]))
