"""Libra's switch as a process on a host: an experiment with the paper's sums of hot rows, beside training jobs."""

from .client import AggregatorClient, HeatLayout

__all__ = ["AggregatorClient", "HeatLayout"]
