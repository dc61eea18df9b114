"""Sums over ranks made by a process of its own, as Libra's switch makes them: `docs/how-to/aggregator.md`."""

from .client import AggregatorClient, HeatLayout, Patience
from .wire import Summation

__all__ = ["AggregatorClient", "HeatLayout", "Patience", "Summation"]
