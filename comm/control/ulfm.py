"""Ranks that outlive others under MPI with user-level failure mitigation: Open MPI 5 and `mpiexec --with-ft ulfm`.

MPI finds out who is left, and carries a few words between them; a mesh does the rest (docs/decisions/0141).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn, TypeVar

from sirtaki.errors import CommError, PeerLostError

from .mpi import load_mpi, skip_finalize

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

APART_S, TOGETHER_S = 0.2, 2.0
"""How long after the last one a rank ends that fails, as others do; and how long all of them take at most."""


def started_to_survive(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether mpiexec has been told to leave the other ranks alone when one is lost."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on")


class Survivors:
    """Those ranks of MPI's world that are left; from one thread at a time."""

    def __init__(self) -> None:
        """Collective over the world.

        Raises:
            CommError: there is no usable MPI library.
        """
        self._mpi = load_mpi()
        skip_finalize()  # which would wait for ranks that go on
        self._left: MPI.Intracomm = self._mpi.COMM_WORLD.Dup()
        self.origin: int = self._left.rank

    def lost(self) -> bool:
        """Whether one of them is gone, as far as this rank has heard; never blocks."""
        try:
            self._left.Iprobe(source=self._mpi.ANY_SOURCE)  # else the library hears nothing
        except self._mpi.Exception:
            return True
        failed = self._left.Get_failed()
        count: int = failed.size
        failed.Free()
        return count > 0

    def alone(self) -> bool:
        """Whether all others are gone, as far as this rank has heard; never blocks, from any thread."""
        with contextlib.suppress(self._mpi.Exception):
            self._left.Iprobe(source=self._mpi.ANY_SOURCE)
        failed = self._left.Get_failed()
        count: int = failed.size
        failed.Free()
        return count >= self._left.size - 1

    def leave(self, exit_code: int) -> NoReturn:
        """Ends this process so that the others hear of it, and with this exit code if it is the last.

        Open MPI 5.0 tells nobody of a process that ends with an exit code other than 0, and waits for ever for it; it
        does tell of one that ends by a signal, and then ends with 0 itself. So ranks that fail together go one
        after the other, and the last one gives the exit code.
        """
        size = self._mpi.COMM_WORLD.size
        deadline_s = time.monotonic() + min(APART_S, TOGETHER_S / size) * self.origin
        while exit_code != 0 and not self.alone() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if exit_code == 0 or self.alone():
            os._exit(exit_code)
        while True:
            os.kill(os.getpid(), signal.SIGKILL)

    def shrink(self, timeout_s: float) -> None:
        """Collective over those that are left, which are the survivors from now on.

        Raises:
            CommError: they have not agreed in time; the library may wait for ever, and this process is to end.
        """
        results: list[MPI.Intracomm | BaseException] = []
        revoked = self._left

        def shrink() -> None:
            try:
                revoked.Revoke()
                results.append(revoked.Shrink())  # type: ignore[arg-type]  # of an intracommunicator
            except BaseException as err:  # told to the caller
                results.append(err)

        # Its variant that does not block fails with an internal error in Open MPI 5.0.
        thread = threading.Thread(target=shrink, name="sirtaki-shrink", daemon=True)
        begin_s = time.monotonic()
        thread.start()
        thread.join(timeout_s)
        if not results:
            raise CommError(f"MPI's survivors did not agree on who is left within {time.monotonic() - begin_s:.0f} s")
        if isinstance(results[0], BaseException):
            raise CommError(f"MPI cannot go on without the ranks that were lost: {results[0]}") from results[0]
        self._left = results[0]

    def exchange(self, value: T) -> list[T]:
        """Collective: what each of them says, in the order of MPI's world.

        Raises:
            PeerLostError: one is lost meanwhile; all others are told, and are to shrink.
        """
        try:
            return self._left.allgather(value)
        except self._mpi.Exception as err:
            self._left.Revoke()
            raise PeerLostError(f"a rank was lost while survivors met: {err}") from err
