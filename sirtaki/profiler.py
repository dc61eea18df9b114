"""What a job does on all ranks, recorded in a folder: operators, gradients, copies, units. docs/how-to/profile.md."""

from sirtaki.analysis.recorder import profile

__all__ = ["profile"]
