"""All of Horovod's operations, for scripts with `from horovod.torch.mpi_ops import …`."""

# ruff: noqa: F403  # the modules define `__all__`

from sirtaki import errors as _errors

from . import basics as _basics  # noqa: F401  # because Horovod scripts use `mpi_ops._basics`
from .basics import *
from .collectives import *
from .process_sets import *

HorovodInternalError = _errors.CommError
"""Error that is raised if communication fails, under Horovod's name."""
