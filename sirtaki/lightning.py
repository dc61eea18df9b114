"""Lightning strategy, registered as "sirtaki". See docs/how-to/lightning.md."""

from sirtaki.integrations.lightning import SirtakiStrategy

__all__ = ["SirtakiStrategy"]
