"""Where this rank runs: its host, whose clock it reads, and which processors it may use."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import torch

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.machine import allowed_processors, cpu_quota

from .recording import Placement


def clock_identity() -> str:
    """Equal for processes whose `time.perf_counter` is one: those of one boot and one time namespace."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not everywhere is there a /proc
        found = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        found.append(os.readlink("/proc/self/ns/time"))
    return " ".join(found)


def own_placement(control: ControlPlane) -> Placement:
    """Of this process."""
    rank = control.rank
    return Placement(
        rank=rank,
        host=control.hosts[rank],
        node=control.node_ranks[0],
        host_name=control.host_names[rank],
        clock=clock_identity(),
        processors=allowed_processors(),
        host_processors=os.cpu_count() or 1,
        quota=cpu_quota(),
        threads=torch.get_num_threads(),
    )
