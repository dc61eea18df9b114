"""Every error that Sirtaki raises on purpose, in one tree.

SirtakiError
├── ConfigError          (ValueError)    a setting or option that is invalid
├── NotInitializedError  (ValueError)    an operation before `init()`
├── PlanError            (ValueError)    knobs or a plan that do not fit the gradients
├── CommError            (RuntimeError)  communication failed; `hvd.HorovodInternalError` is this class
│   ├── MismatchError                    ranks disagree about an operation
│   ├── PeerLostError                    a rank died, left or raised
│   │   └── PeerFaultError               its communication has failed, and with it that of all
│   ├── StallError                       a rank did not come within the stall time
│   ├── TransportError                   a transport, or so many streams of it, cannot be opened here
│   └── AggregatorError                  an aggregator is gone, refuses, or waits for a rank that does not come
├── GradientError        (RuntimeError)  a gradient was changed while it was being reduced
├── StaleReadError       (RuntimeError)  a parameter was read before its update, which `overlap_forward` has put off
├── TuningError          (RuntimeError)  an arm, model or trial that cannot be used
├── RegistryError        (RuntimeError)  a store that cannot be read or written
│   └── CorruptStoreError                its file is no registry, or a damaged one
├── LaunchError          (RuntimeError)  ranks could not be started
├── RecordingError       (RuntimeError)  a recording of a job that cannot be read or written
├── ReplayError          (ValueError)    a recording or a question about it that cannot be replayed
└── TranslationError     (ValueError)    a script that `sirtaki translate` does not understand
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path


def in_a_line(error: BaseException, where: str = "") -> str:
    """Type, message and the line that has raised it: what a log says of a fault that a job goes on without.

    Args:
        error: with its traceback, if it was raised.
        where: training was at that time; empty = unknown.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames[-1:]]
    places = "; ".join(place for place in (*lines, where) if place)
    return f"{type(error).__name__}: {' '.join(str(error).split())}{f' ({places})' if places else ''}"


class SirtakiError(Exception):
    """Base of all errors of this package."""


class ConfigError(SirtakiError, ValueError):
    """A setting or option has a value that is invalid; the message says what is accepted."""


class NotInitializedError(SirtakiError, ValueError):
    """An operation was called before `init()` or after `shutdown()`."""


class PlanError(SirtakiError, ValueError):
    """Knobs or a plan do not fit the gradients or the transport."""


class CommError(SirtakiError, RuntimeError):
    """Communication between the ranks failed."""


class MismatchError(CommError):
    """Ranks submitted operations of one name that differ in kind, shape, dtype, root or factors."""


class PeerLostError(CommError):
    """A rank died, left the job or raised an exception while others still needed it."""


class PeerFaultError(PeerLostError):
    """A rank lives, but its communication has failed, and with it that of all; the message says what went wrong."""


class StallError(CommError):
    """A rank did not take part in an operation within the stall time."""


class TransportError(CommError):
    """A transport, or so many streams of it, cannot be opened; raised on all ranks alike, which may go on without."""


class AggregatorError(CommError):
    """No aggregator answers or takes the job, or ranks do not come to it; sums have to be made by other means."""


class GradientError(SirtakiError, RuntimeError):
    """A gradient was written between its backward pass and the end of its reduction."""


class StaleReadError(SirtakiError, RuntimeError):
    """A parameter was read while its update was put off, by what does not wait (`SIRTAKI_OVERLAP_FORWARD=check`)."""


class TuningError(SirtakiError, RuntimeError):
    """A search technique, a model or a trial cannot be used; the message says why."""


class RegistryError(SirtakiError, RuntimeError):
    """The registry cannot be read or written."""


class CorruptStoreError(RegistryError):
    """The file at `path` is no registry, or a damaged one; None where it is not said."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message, path)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class LaunchError(SirtakiError, RuntimeError):
    """The ranks of a job could not be started."""


class RecordingError(SirtakiError, RuntimeError):
    """A recording of a job cannot be read or written; the message says what is there."""


class ReplayError(SirtakiError, ValueError):
    """A recording, or what is asked of it, cannot be replayed; the message says why."""


class TranslationError(SirtakiError, ValueError):
    """A script cannot be translated.

    Attributes:
        obstacles: (line, reason) of each thing that is not understood, by line.
    """

    obstacles: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, obstacles: Sequence[tuple[int, str]]) -> TranslationError:
        """An error that names them all."""
        ordered = tuple(sorted(set(obstacles)))
        error = cls("; ".join(f"line {line}: {reason}" for line, reason in ordered))
        error.obstacles = ordered
        return error
