"""The environment of ranks: what the launcher passes on, leaves out and adds, whoever starts them."""

import os
from collections.abc import Mapping

from sirtaki.errors import ConfigError
from sirtaki.launchers import AGENT, TORCH_NAMES
from sirtaki.settings import Settings

from .as_horovod import SHIM
from .console import say

# What an outer MPI job leaves in the environment; mpiexec would believe to be one of its ranks.
_OUTER_JOB = (
    "PMIX_",
    "PMI_",
    "OMPI_COMM_WORLD",
    "OMPI_UNIVERSE",
    "PRTE_LAUNCHED",
    "HYDI_",
    "MPI_LOCAL",
    "TORCHELASTIC_",
)
_OUTER_RANK = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Where an unchanged DDP script's `init_process_group()` meets."""

CROWD = 4
"""Ranks a core from which on the user is told what that means."""

_RANK_START_S, _RANK_GB = 2.5, 0.25  # of a core, and of memory: what importing PyTorch takes a rank

# glibc gives freed memory back to the system and takes it again, page by page, for the next step's gradients: on CPUs
# that can cost more than reducing them. So a rank keeps what it has freed, as torch does with a GPU's memory.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def exported_variables(words: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """`-x NAME=value` as it is, `-x NAME` with the launcher's value.

    Raises:
        ConfigError: there is no such variable.
    """
    found = {}
    for word in words:
        name, given, value = word.partition("=")
        if not name or (not given and name not in environ):
            raise ConfigError(f"-x {word}: {name or 'the variable'} is not set; write -x NAME=value or set it first")
        found[name] = value if given else environ[name]
    return found


def rank_environ(environ: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment without what an outer job has left in it, and with what is added."""
    outer = {f"HOROVOD_{name}" for name in _OUTER_RANK} | {*TORCH_NAMES.values(), AGENT, "HOROVOD_ELASTIC"}
    if "RANK" in environ:  # so this is a rank itself, of torchrun's or ours, and they meet elsewhere
        outer.update(RENDEZVOUS)
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTER_JOB) and name not in outer}
    return {**kept, **added}


def add_defaults(environ: dict[str, str], *, local_ranks: int, cores: int, interfaces: str) -> None:
    """Adds what the user has not set.

    Args:
        environ: of the ranks, changed in place.
        local_ranks: how many the fullest host may get.
        cores: that they share.
        interfaces: that the user has named; "" = any.
    """
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // local_ranks)))
    for name, value in KEEP_FREED_MEMORY.items():
        environ.setdefault(name, value)
    if interfaces:
        environ.update(dict.fromkeys(("SIRTAKI_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), interfaces))


def say_notes(notes: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Tells which options and variables have no effect.

    Raises:
        ConfigError: a variable has no valid value.
    """
    for note in (*notes, *Settings.from_environ(environ).notes):
        say(note)


def put_shim_first(environ: dict[str, str], beside: str) -> None:
    """Has `import horovod` give Sirtaki; `beside` = the version of an installed Horovod, or ""."""
    environ["PYTHONPATH"] = os.pathsep.join([str(SHIM), *filter(None, [environ.get("PYTHONPATH")])])
    say(f"`import horovod` gives Sirtaki{f'; the installed Horovod {beside} is set aside' if beside else ''}")


def crowd_note(ranks: int, cores: int) -> str:
    """What so many ranks on so few cores mean; "" = nothing worth telling."""
    if ranks <= CROWD * cores:
        return ""
    start_s, memory_gb = ranks * _RANK_START_S / cores, ranks * _RANK_GB
    start = f"{start_s:.0f} s" if start_s < 100 else f"{start_s / 60:.0f} minutes"
    return f"{ranks} ranks share {cores} cores: importing PyTorch alone takes about {start} and {memory_gb:.0f} GB"
