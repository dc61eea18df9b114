"""All operations under the name by which Horovod scripts import them: `from horovod.torch.mpi_ops import …`."""

# ruff: noqa: F403  # they say what they have

from sirtaki.errors import CommError

from . import basics, collectives
from . import basics as _basics  # noqa: F401  # scripts reach for it
from .basics import *
from .collectives import *
from .process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

HorovodInternalError = CommError
"""Horovod's name for failed communication."""

__all__ = ["HorovodInternalError", "ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
__all__ += basics.__all__
__all__ += collectives.__all__
