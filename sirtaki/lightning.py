"""Sirtaki in Lightning: a strategy, registered as "sirtaki". docs/how-to/lightning.md."""

from sirtaki.integrations.lightning import SirtakiStrategy

__all__ = ["SirtakiStrategy"]
