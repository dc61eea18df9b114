"""What runs in the processes of ranks that are Ray's actors.

An actor's process goes on when the user's function fails in it, so the other ranks must be told; a script's process
ends then, which they notice by themselves.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sirtaki.comm.control.addresses import LOOPBACK, host_identity, own_addresses, serve_store
from sirtaki.engine.membership import AgentClient, Proof, register
from sirtaki.run.elastic.agent import Place, reach_driver

from . import ray_logger
from .placement import ActorPlace


@dataclass(frozen=True, slots=True)
class Executable:
    """A class and what it is called with."""

    cls: type[Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def make(self) -> Any:
        """An object of it."""
        return self.cls(*self.args, **self.kwargs)


_T = TypeVar("_T")


def call_telling_others(fn: Callable[[], _T]) -> _T:
    """Calls it; where it raises this rank leaves the job, and the others' collectives fail with the reason."""
    try:
        return fn()
    except BaseException as err:
        leave_job(f"a rank raised {type(err).__name__}: {err}")
        raise


def leave_job(reason: str) -> None:
    """Not collective: ends this rank's part in the job. Harmless where there is none.

    Args:
        reason: what the others are told.
    """
    if "sirtaki.torch" not in sys.modules:  # then nobody has called init(), and it takes seconds to load
        return
    from sirtaki.engine import job
    from sirtaki.torch.basics import let_go

    job.leave(together=False, reason=reason)
    let_go()


class Rank:
    """An actor, which Ray names in what it shows of its output."""

    def __init__(self) -> None:
        self._store: Any = None  # a TCPStore
        self._executable: Any = None  # of the user's class

    def place(self) -> ActorPlace:
        """Where Ray has put this process."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorPlace(
            host=host_identity(), address=ray.util.get_node_ip_address(), gpus=tuple(str(gpu) for gpu in gpus)
        )

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Before anything of the user's runs: sets environment variables."""
        os.environ.update(variables)

    def open_store(self, *, one_host: bool, interfaces: str) -> tuple[str, int]:
        """On rank 0: opens the store in which the ranks meet, at a port that is free, and says where it is."""
        import ray

        addresses = own_addresses(interfaces) if interfaces else [ray.util.get_node_ip_address()]
        host = LOOPBACK if one_host else addresses[0]
        # multi_tenant: `init()` opens it once more, and so may the user's `init_process_group()`
        self._store = serve_store(host, timeout=datetime.timedelta(seconds=300), multi_tenant=True)
        return host, self._store.port

    def make_executable(self, executable: Executable) -> None:
        """Makes the user's object, which functions are given."""
        self._executable = call_telling_others(executable.make)

    def execute(self, call: int, fn: Callable[[Any], Any], log: Any = None) -> Any:
        """Calls the function with the user's object, None if there is none.

        Args:
            call: names this one; all ranks of a call have the same number.
            fn: of the user.
            log: Ray's queue for what `ray_logger.log` is given; None = nobody listens.
        """
        ray_logger.configure(log)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(call)  # who did not come to the last meeting misses that only
        return call_telling_others(lambda: fn(self._executable))

    def run(self, call: int, told: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]) -> Any:
        """The same of a function, its arguments and keyword arguments, without the object."""
        fn, args, kwargs = told
        return self.execute(call, lambda _: fn(*args, **kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """What a rank is told.

    Attributes:
        worker: names it in the job.
        host: of it, as the job calls it.
        places: where the driver listens.
        proof: with which it proves itself there.
        interface: network interface that joins the hosts; None = any.
    """

    worker: int
    host: str
    places: tuple[Place, ...]
    proof: Proof
    interface: str | None = None


@dataclass(frozen=True, slots=True)
class Dismissal:
    """What a rank returns that is not wanted any more."""


class ElasticRank:
    """An actor, which Ray names in what it shows of its output; used for one call."""

    def train(self, enrolment: Enrolment, fn: Callable[[], Any], log: Any = None) -> Any:
        """Calls the function as a member of the job.

        Args:
            enrolment: of this rank.
            fn: of the user.
            log: see `ray_logger.configure`.

        Returns:
            What it returns, or `Dismissal`.
        """
        from sirtaki.engine import process_end

        sock = reach_driver(enrolment.places, proof=enrolment.proof, number=enrolment.worker)
        register(lambda: AgentClient(sock, interface=enrolment.interface))
        os.environ |= {"HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": enrolment.host}
        ray_logger.configure(log)
        try:
            result = fn()
        except SystemExit as err:
            if err.code:
                leave_job(f"a rank ended with exit code {err.code}")
                raise RuntimeError(f"the function ended with exit code {err.code}") from err
            return Dismissal()
        except BaseException as err:
            leave_job(f"a rank raised {type(err).__name__}: {err}")
            raise
        process_end.finish()
        return result
