"""`sirtakirun`: launch the ranks of a job. The function `run` launches ranks from Python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .function import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    """Import `run` only when it is used, because helper processes of the launcher also import this package and do not
    need `run`.
    """
    if name == "run":
        from .function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
