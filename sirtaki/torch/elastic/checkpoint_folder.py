"""A folder of checkpoints: each one whole or not there, the newest three, found again only if nothing in it is damaged.

DIR/checkpoint-00000042/state.pt         what `torch.load(…, weights_only=False)` opens
                        manifest.json    its digest and size, the commit's number, when it was written
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

KEPT = 3
STATE, MANIFEST = "state.pt", "manifest.json"
_PREFIX, _UNFINISHED = "checkpoint-", "writing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole.

    Attributes:
        number: of the commit.
        path: its folder.
    """

    number: int
    path: Path

    def load(self) -> dict[str, Any]:
        """What was written (Any: whatever pickles). It runs code that its writer chose, as `torch.load` does."""
        tree: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=False)
        return tree


class CheckpointFolder:
    """Where the checkpoints of one job lie."""

    def __init__(self, path: Path) -> None:
        """The folder need not be there."""
        self.path = path

    def write(self, number: int, tree: Mapping[str, Any]) -> None:
        """Writes one beside the others, then has it appear at once; then the oldest go.

        Raises:
            OSError: it could not be written; the others are as they were.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_UNFINISHED}*"):  # by a writer that is gone
            shutil.rmtree(left, ignore_errors=True)
        unfinished, final = self.path / f"{_UNFINISHED}{os.getpid()}", self._place(number)
        try:
            unfinished.mkdir()
            state = unfinished / STATE
            torch.save(dict(tree), state)
            manifest = {"number": number, "bytes": state.stat().st_size, "sha256": _digest(state), "at": time.time()}
            (unfinished / MANIFEST).write_text(json.dumps(manifest) + "\n")
            for file in (state, unfinished / MANIFEST, unfinished):
                _sync(file)
            shutil.rmtree(final, ignore_errors=True)  # of a job that went on from an older one
            unfinished.rename(final)
            _sync(self.path)
        except RuntimeError as err:  # PyTorch's, where the disk is full
            raise OSError(str(err).splitlines()[0]) from err
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        for path in self._there()[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> Checkpoint | None:
        """The newest one that is whole; None if there is none. Says which ones are damaged."""
        for path in reversed(self._there()):
            problem = _problem(path)
            if not problem:
                return Checkpoint(_number(path), path)
            logger.warning("the checkpoint %s is not used: %s", path, problem)
        return None

    def _place(self, number: int) -> Path:
        return self.path / f"{_PREFIX}{number:08}"

    def _there(self) -> list[Path]:
        """The oldest first."""
        found = [path for path in self.path.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
        return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _problem(path: Path) -> str:
    """Why it cannot be used; empty if it can."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        size, digest = manifest["bytes"], manifest["sha256"]
        if (path / STATE).stat().st_size != size:
            return f"{STATE} has {(path / STATE).stat().st_size} bytes, not {size}"
        if _digest(path / STATE) != digest:
            return f"{STATE} is not what was written"
    except (OSError, ValueError, KeyError, TypeError) as err:
        return f"{type(err).__name__}: {err}"
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Has the disk hold it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # not every file system can do that with folders
            raise
    finally:
        os.close(descriptor)
