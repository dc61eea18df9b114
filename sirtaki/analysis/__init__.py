"""What recordings, trial logs and timelines of jobs say. docs/how-to/records.md."""

from .records import read

__all__ = ["read"]
