"""`sirtakirun`: starts the ranks of a job. `run` does it from Python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .function import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    """Loads `run` for those who ask: agents and janitors, one or two a host, need nothing of it."""
    if name == "run":
        from .function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
