"""What this machine's NCCL can do: whether several communicators may run at the same time, and with how many.

Rules about versions, which change, and which can be tested without a GPU.

Before NCCL 2.26 all operations of all communicators of a device had to be put into one order by the caller. Since then
`NCCL_LAUNCH_ORDER_IMPLICIT=1` makes NCCL keep the order in which the host has issued them; with CUDA 12.3 or newer
(driver and runtime) they overlap even so. Without that several streams can deadlock, so there is one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
ORDERED_NCCL = (2, 26)
OVERLAPPING_CUDA = (12, 3)

MAX_STREAMS = 24
"""As AIACC used at most; how many of them fit into the GPU's memory, `CommunicatorPool` sees when a plan is opened."""

THREADS_PER_CTA = 512
"""NCCL's block size on current GPUs (`NCCL_NTHREADS`, which is one for the whole process)."""

MAX_CTAS = 32

ALLOWANCES = tuple(THREADS_PER_CTA * ctas for ctas in (1, 2, 4, 8, 16))
"""GPU threads that a unit may be allowed: each another number of CTAs, since fewer than a block's are a block, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclVersions:
    """The versions that decide.

    Attributes:
        nccl: as (major, minor, patch).
        cuda_runtime: that torch was built for, as (major, minor).
        cuda_driver: the newest CUDA that the driver supports, as (major, minor).
        launch_order: the value of `NCCL_LAUNCH_ORDER_IMPLICIT`, "" if it is not set.
    """

    nccl: tuple[int, ...]
    cuda_runtime: tuple[int, int]
    cuda_driver: tuple[int, int]
    launch_order: str

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> NcclVersions:
        """This process's; needs a GPU."""
        driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # the stub lacks it
        major, minor = (int(part) for part in str(torch.version.cuda).split(".")[:2])
        return cls(
            nccl=tuple(torch.cuda.nccl.version()),  # type: ignore[no-untyped-call]  # torch's
            cuda_runtime=(major, minor),
            cuda_driver=(driver // 1000, driver % 1000 // 10),
            launch_order=environ.get(LAUNCH_ORDER, ""),
        )

    @property
    def max_streams(self) -> int:
        """How many communicators may run at the same time."""
        return 1 if self.why_one_stream else MAX_STREAMS

    @property
    def why_one_stream(self) -> str:
        """What forbids several, in words; empty if nothing does."""
        if self.nccl[:2] < ORDERED_NCCL:
            return f"NCCL {_dotted(self.nccl)} cannot order several communicators; {_dotted(ORDERED_NCCL)} can"
        if self.launch_order != "1":
            return f"{LAUNCH_ORDER} is {self.launch_order or 'not set'}, and it must be 1 before NCCL starts"
        for name, version in (("runtime", self.cuda_runtime), ("driver", self.cuda_driver)):
            if version < OVERLAPPING_CUDA:
                return f"CUDA's {name} is {_dotted(version)}; communicators overlap from {_dotted(OVERLAPPING_CUDA)} on"
        return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def ask_for_launch_order() -> None:
    """Has NCCL keep the host's order, unless the user has said otherwise; before the first communicator of all."""
    os.environ.setdefault(LAUNCH_ORDER, "1")


def ctas_for(threads: int | None) -> int | None:
    """CTAs (thread blocks) of a communicator that may use so many GPU threads (LIBRA's r); None = NCCL decides."""
    if threads is None:
        return None
    return min(MAX_CTAS, max(1, threads // THREADS_PER_CTA))
