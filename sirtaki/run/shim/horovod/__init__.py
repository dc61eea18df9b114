"""`import horovod` under `sirtakirun --as-horovod`: Sirtaki under Horovod's name."""

from collections.abc import Callable
from typing import Any

from sirtaki.run.as_horovod import install

# The release of Horovod whose API Sirtaki implements; scripts compare it with the version that they need.
__version__ = "0.28.1"

install()


def __getattr__(name: str) -> Callable[..., Any]:
    """Import `horovod.run` lazily."""
    if name == "run":
        from sirtaki.run import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
