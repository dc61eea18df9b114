"""All operations under the name by which Horovod scripts import them: `from horovod.torch.mpi_ops import …`."""

# ruff: noqa: F403  # they say what they have

from sirtaki import errors as _errors

from . import basics as _basics  # noqa: F401  # scripts reach for it
from .basics import *
from .collectives import *
from .process_sets import *

HorovodInternalError = _errors.CommError
"""Horovod's name for failed communication."""
