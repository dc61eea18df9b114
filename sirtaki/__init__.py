"""Sirtaki: gradient synchronisation for data-parallel PyTorch that tunes itself while it trains.

Training scripts import `sirtaki.torch`. Importing only this package starts nothing and does not load torch or MPI.
"""

__version__ = "0.2.0"
