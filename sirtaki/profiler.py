"""Profiler that records operators, gradients, copies and units of all ranks in a folder. See docs/how-to/profile.md."""

from sirtaki.analysis.recorder import profile

__all__ = ["profile"]
