"""`horovod.runner`: the launcher from Python."""

from sirtaki.run import run

__all__ = ["run"]
