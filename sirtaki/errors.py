"""All exception classes of Sirtaki.

SirtakiError
├── ConfigError          (ValueError)    a setting or option that is invalid
├── NotInitializedError  (ValueError)    an operation before `init()`
├── PlanError            (ValueError)    a setting (knobs) or plan that does not fit the gradients
├── CommError            (RuntimeError)  communication failed; `hvd.HorovodInternalError` is this class
│   ├── MismatchError                    ranks disagree about an operation
│   ├── PeerLostError                    a rank died, left or raised
│   │   └── PeerFaultError               a rank is alive, but its communication failed
│   ├── StallError                       a rank did not take part within the stall time
│   ├── TransportError                   a transport, or its number of streams, cannot be opened here
│   ├── ResourceLimitError               this process may not start a further thread
│   └── AggregatorError                  an aggregator has exited, rejects the job, or waits for a rank
├── GradientError        (RuntimeError)  a gradient was changed while it was being reduced
├── StaleReadError       (RuntimeError)  a parameter was read before its deferred update (`overlap_forward`)
├── TuningError          (RuntimeError)  a search method (arm), cost model or trial that cannot be used
├── RegistryError        (RuntimeError)  a registry that cannot be read or written
│   └── CorruptStoreError                a file that is not a registry, or a damaged one
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
    """Return an error's type, message and source line as one line of text. For logging errors that do not end the job.

    Args:
        error: the error. Without a traceback, the source line is omitted.
        where: position in training at which the error was raised, such as an iteration. "" if unknown.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames[-1:]]
    places = "; ".join(place for place in (*lines, where) if place)
    return f"{type(error).__name__}: {' '.join(str(error).split())}{f' ({places})' if places else ''}"


class SirtakiError(Exception):
    """Base class of all errors of this package."""


class ConfigError(SirtakiError, ValueError):
    """A setting or option has an invalid value. The message names the accepted values."""


class NotInitializedError(SirtakiError, ValueError):
    """An operation was called before `init()` or after `shutdown()`."""


class PlanError(SirtakiError, ValueError):
    """A communication setting (knobs) or a plan does not fit the gradients or the transport."""


class CommError(SirtakiError, RuntimeError):
    """Communication between ranks failed."""


class MismatchError(CommError):
    """Ranks submitted operations with equal names but different kinds, shapes, dtypes, roots or scale factors."""


class PeerLostError(CommError):
    """A rank died, left the job or raised an exception while other ranks still needed it."""


class PeerFaultError(PeerLostError):
    """A rank is alive, but its communication failed, so that the communication of all ranks failed.

    The message has the cause.
    """


class StallError(CommError):
    """A rank did not take part in an operation within the stall time."""


class TransportError(CommError):
    """A transport, or the requested number of streams, cannot be opened.

    All ranks raise this error together, so they may continue with another transport.
    """


class ResourceLimitError(CommError):
    """A thread cannot be started, because a limit is reached. The message names the limit, its value and the remedy.

    In an elastic job the rank ends with this error instead of restoring a commit, because the error would recur.
    """


class AggregatorError(CommError):
    """An aggregator (a server that sums sparse gradients) cannot be reached, or rejects the job.

    Or it sends no sums, because it waits for a slow or lost rank. Gradients must be reduced without the aggregator.
    """


class GradientError(SirtakiError, RuntimeError):
    """A gradient was modified between its backward pass and the end of its reduction."""


class StaleReadError(SirtakiError, RuntimeError):
    """User code read a parameter before its deferred update (`SIRTAKI_OVERLAP_FORWARD=check` detects this)."""


class TuningError(SirtakiError, RuntimeError):
    """A search method (arm) of the tuner, a cost model or a trial cannot be used. The message has the reason."""


class RegistryError(SirtakiError, RuntimeError):
    """The registry cannot be read or written."""


class CorruptStoreError(RegistryError):
    """A registry's file is damaged, or is not a registry.

    Attributes:
        path: the registry's file. None if unknown.
    """

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message, path)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class LaunchError(SirtakiError, RuntimeError):
    """The ranks of a job could not be started."""


class RecordingError(SirtakiError, RuntimeError):
    """A recording of a job cannot be read or written. The message describes the files found."""


class ReplayError(SirtakiError, ValueError):
    """A recording of a job cannot be replayed (simulated), at least not with the requested changes.

    The message has the reason.
    """


class TranslationError(SirtakiError, ValueError):
    """A script cannot be translated.

    Attributes:
        obstacles: (line, reason) pairs of the statements that cannot be translated, in ascending order of line.
    """

    obstacles: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, obstacles: Sequence[tuple[int, str]]) -> TranslationError:
        """Create an error whose message lists all obstacles."""
        ordered = tuple(sorted(set(obstacles)))
        error = cls("; ".join(f"line {line}: {reason}" for line, reason in ordered))
        error.obstacles = ordered
        return error


def require(valid: object, name: str, rule: object, found: object, error: type[SirtakiError] = ConfigError) -> None:
    """Raise an error if a value is invalid. The message is the same sentence for all kinds of values.

    Args:
        valid: false if the value is invalid.
        name: name of the argument, field or option.
        rule: accepted values, such as "at least 1".
        found: value that the caller found.
        error: class of the error.
    """
    if not valid:
        raise error(f"invalid value of {name}: expected {rule}, found {found!s:.300}")
