"""Jobs whose ranks are threads of this process, for tests of `hvd` functions."""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sirtaki.comm.collectives.engine import GLOBAL, RankSets
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.engine import job

from .meshes import on_planes


class _Watchdog:
    def watch(self, *who: object) -> None:
        pass

    def unwatch(self, *who: object) -> None:
        pass


def on_jobs(size: int, act: Callable[[int], Any]) -> list[Any]:
    """Call `act(rank)` in one thread per rank, where `job.current()` is this rank's job. Return the results by rank."""
    here = threading.local()

    def run(control: ControlPlane) -> Any:
        sets = RankSets(control, _Watchdog())  # type: ignore[arg-type]
        engine = sets[GLOBAL].engine
        serials: Any = defaultdict(itertools.count)
        here.job = SimpleNamespace(
            control=control, engine=engine, rank_sets=sets, serials=serials, settled=True, elastic=None, size=size
        )
        result = act(control.rank)
        sets.close()
        return result

    with patch.object(job, "current", lambda: here.job), patch.object(job, "is_initialized", lambda: True):
        return on_planes(size, run)
