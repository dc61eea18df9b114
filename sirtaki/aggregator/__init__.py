"""Sums over ranks made by a process of its own, as Libra's switch makes them: `docs/how-to/aggregator.md`.

Tensors, and one verdict on all ranks, are in `sirtaki.aggregator.client`; what is here needs no PyTorch.
"""

from .client import AggregatorClient, HeatLayout, Patience
from .wire import Summation

__all__ = ["AggregatorClient", "HeatLayout", "Patience", "Summation"]
