"""`sirtakirun`: starts the ranks of a job. `run` does it from Python."""

from .function import run

__all__ = ["run"]
