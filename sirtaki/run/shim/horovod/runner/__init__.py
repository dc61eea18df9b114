"""`horovod.runner`: provides `horovod.run`, which launches ranks from Python."""

from sirtaki.run import run

__all__ = ["run"]
