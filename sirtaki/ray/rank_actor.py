"""What runs in the process of each rank whose number stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from sirtaki.comm.control.addresses import LOOPBACK, host_identity, own_addresses

from . import ray_logger
from .executable import Executable
from .places import ActorPlace
from .telling import call_telling_others


class Rank:
    """An actor, which Ray names in what it shows of its output."""

    def __init__(self) -> None:
        self._store: Any = None  # a TCPStore
        self._executable: Any = None  # of the user's class

    def place(self) -> ActorPlace:
        """Where Ray has put this process."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorPlace(
            host=host_identity(), address=ray.util.get_node_ip_address(), gpus=tuple(str(gpu) for gpu in gpus)
        )

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Before anything of the user's runs: sets environment variables."""
        os.environ.update(variables)

    def open_store(self, *, one_host: bool, interfaces: str) -> tuple[str, int]:
        """On rank 0: opens the store in which the ranks meet, at a port that is free, and says where it is."""
        from torch._C._distributed_c10d import TCPStore

        addresses = own_addresses(interfaces) if interfaces else [ray.util.get_node_ip_address()]
        host = LOOPBACK if one_host else addresses[0]
        # multi_tenant: `init()` opens it once more, and so may the user's `init_process_group()`
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
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
