"""Sirtaki: gradient synchronisation for data-parallel PyTorch that tunes itself while it trains.

Scripts import `sirtaki.torch`; importing this package alone starts nothing and loads neither torch nor MPI.
"""

__version__ = "0.2.0"
