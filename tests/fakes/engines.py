"""Engines for eager operations whose ranks all live in this process."""

from collections.abc import Callable
from typing import Any

from sirtaki.comm.collectives.engine import EagerEngine
from sirtaki.comm.control.plane import ControlPlane

from .meshes import on_planes


def on_engines(size: int, act: Callable[[ControlPlane, EagerEngine], Any]) -> list[Any]:
    """What `act` returns with the control plane and the engine of each of so many ranks."""

    def run(control: ControlPlane) -> Any:
        engine = EagerEngine(control.comm, control.failures)
        result = act(control, engine)
        assert engine.close()
        return result

    return on_planes(size, run)
