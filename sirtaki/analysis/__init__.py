"""Analysis of recordings, trial logs and timelines. Start with docs/how-to/records.md."""

from .records import read

__all__ = ["read"]
