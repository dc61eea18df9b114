"""Detect which launcher started this process: Open MPI, MPICH, Slurm, torchrun or an elastic agent."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sirtaki.errors import ConfigError, require

# First port and number of ports for the rendezvous of a Slurm job. They are below the kernel's ephemeral ports. The
# number is prime, so that consecutive jobs get different ports.
_FIRST_PORT, _PORTS = 20011, 10007

_NEARER = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "TORCHELASTIC_RUN_ID")
"""Environment variables of launchers that may run inside an srun task. If one is set, SLURM_PROCID is the rank of the
launcher's daemon, not of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRank:
    """Rank of this process and the rendezvous address, as set by torchrun or Slurm.

    Attributes:
        host, port: rendezvous address of the ranks. "" and 0 for a job of one rank.
        attempt: text that identifies the job and counts its restarts.
        agent_store: True if torchrun's agent hosts the rendezvous store. If False, rank 0 hosts the store.
        local_rank, local_size: rank on this node, and number of ranks on this node. Set for srun tasks only.
    """

    rank: int
    size: int
    host: str
    port: int
    attempt: str
    agent_store: bool = False
    local_rank: int | None = None
    local_size: int | None = None


def step_place(environ: Mapping[str, str] = os.environ) -> LauncherRank | None:
    """Return the rank of this srun task, and the address at which all tasks of the job step meet.

    The address is that of the step's first node, with a port derived from the ids of job and step.

    Returns:
        None if the step has only one task, or if a launcher inside the step started this process.

    Raises:
        ConfigError: Slurm's variables contradict each other.
    """
    # Read SLURM_STEP_NUM_TASKS, which is set only in a job step. SLURM_NTASKS is set in every process of an allocation.
    size = _slurm_number(environ, "SLURM_STEP_NUM_TASKS")
    if size < 2 or any(name in environ for name in _NEARER):
        return None
    tasks = task_counts(environ, "SLURM_STEP_TASKS_PER_NODE")
    node, nodes = _slurm_number(environ, "SLURM_NODEID"), node_names(environ.get("SLURM_STEP_NODELIST", ""))
    if node >= len(tasks) or not nodes:
        raise ConfigError(
            f"Slurm's variables contradict each other: SLURM_NODEID={node}, SLURM_STEP_TASKS_PER_NODE="
            f"{environ.get('SLURM_STEP_TASKS_PER_NODE', '')!r} and SLURM_STEP_NODELIST="
            f"{environ.get('SLURM_STEP_NODELIST', '')!r}; only srun may set them"
        )
    job, step = _slurm_number(environ, "SLURM_JOB_ID"), _slurm_number(environ, "SLURM_STEP_ID")
    return LauncherRank(
        rank=_slurm_number(environ, "SLURM_PROCID"),
        size=size,
        host=nodes[0],
        port=_FIRST_PORT + (31 * job + step) % _PORTS,
        attempt=f"slurm/{job}.{step}/{_slurm_number(environ, 'SLURM_RESTART_COUNT')}",
        local_rank=_slurm_number(environ, "SLURM_LOCALID"),
        local_size=tasks[node],
    )


def task_counts(environ: Mapping[str, str], name: str) -> list[int]:
    """Parse the numbers of tasks on each node from Slurm's variable `name`: `2(x3),1` becomes 2, 2, 2, 1.

    Raises:
        ConfigError: the value does not have this format.
    """
    text = environ.get(name, "1")
    counts: list[int] = []
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if matched is None:
            raise ConfigError(
                f"the environment variable {name}={text!r} must have Slurm's format for tasks per node, such as 2(x3),1"
            )
        counts += [int(matched[1])] * int(matched[2] or 1)
    return counts


def node_names(text: str) -> list[str]:
    """Expand Slurm's `gpu[01-03,7],login` to `gpu01 gpu02 gpu03 gpu7 login`."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        bracket = re.search(r"\[([^\]]*)\]", part)
        if bracket is None:
            names.append(part)
            continue
        before, after = part[: bracket.start()], part[bracket.end() :]
        for span in bracket[1].split(","):
            first, _, last = span.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names += node_names(f"{before}{number:0{len(first)}d}{after}")
    return names


def _slurm_number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


# Environment variables by quantity, as set by Open MPI, Hydra (MPICH, Intel MPI) and PMIx. If several are set, the
# first one counts.
_PLACES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}

# Variables of Open MPI, Hydra, PMIx, MVAPICH, Cray and IBM. If one is set, an mpiexec, or a batch system that starts
# MPI ranks, has started this process.
_OF_MPI = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "JSM_NAMESPACE_RANK",
)

HOROVOD_NAMES = {name: f"HOROVOD_{name}" for name in _PLACES}
"""Names of the environment variables that Horovod scripts read, by quantity ("RANK", "SIZE", …)."""

TORCH_NAMES = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
"""Names of the environment variables that `init_process_group()` and torchrun scripts read, by quantity ("RANK",
"SIZE", …).
"""

AGENT = "SIRTAKI_AGENT"
"""Environment variable of a rank of an elastic job: file descriptor of the socket to the process that started the rank
(agent).
"""

BAR = "SIRTAKI_BAR"
"""Environment variable that a launcher sets if it draws the progress bar of tuning for its ranks."""

_REMEDY = "start the job with `sirtakirun -np {size} python …`"
_SRUN_REMEDY = (
    "set SIRTAKI_CONTROL=mesh, which needs no MPI, or use `srun --mpi=pmix` (`srun --mpi=list` lists the types)"
)


def place(name: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return RANK, SIZE, LOCAL_RANK or LOCAL_SIZE as set by the launcher. None if the launcher does not set it."""
    found = next((int(environ[key]) for key in _PLACES[name] if environ.get(key, "").isdecimal()), None)
    if found is None and (step := step_place(environ)) is not None:
        return int(getattr(step, name.lower()))
    return found


def started_by_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has started this process directly.

    sirtakirun removes torchrun's variables from the environment of its ranks.
    """
    return "TORCHELASTIC_RUN_ID" in environ


def started_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether an mpiexec, or a batch system with MPI support, started this process."""
    return any(name in environ for name in _OF_MPI)


def started_by_srun(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is one of several tasks of an srun job step."""
    return step_place(environ) is not None


def torch_place(environ: Mapping[str, str] = os.environ) -> LauncherRank | None:
    """Return rank and rendezvous address from torchrun's environment variables, otherwise from Slurm's. None without
    both.

    Raises:
        ConfigError: a variable is missing or contradicts another one. The message contains a remedy.
    """
    if not (environ.get("RANK", "") and environ.get("WORLD_SIZE", "")):
        step = step_place(environ)
        if step is not None and environ.get("MASTER_ADDR"):
            step = replace(step, host=environ["MASTER_ADDR"])
        if step is not None and environ.get("MASTER_PORT"):
            step = replace(step, port=_number("MASTER_PORT", environ, least=1))
        return step
    rank, size = _number("RANK", environ, least=0), _number("WORLD_SIZE", environ, least=1)
    require(rank < size, "the environment variable RANK", f"less than WORLD_SIZE={size}", rank)
    local, local_size = environ.get("LOCAL_RANK", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if local and local_size:
        valid = _number("LOCAL_RANK", environ, least=0) < _number("LOCAL_WORLD_SIZE", environ, least=1) <= size
        rule = f"LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE={size}"
        require(valid, "the environment", rule, f"LOCAL_RANK={local} and LOCAL_WORLD_SIZE={local_size}")

    host, port = environ.get("MASTER_ADDR", ""), 0
    if size > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={size}, but the ranks cannot connect, because these environment variables are missing: "
                f"{', '.join(missing)}. Start the ranks with torchrun or sirtakirun, or set the variables (for a job "
                "of one rank: unset RANK and WORLD_SIZE)"
            )
        port = _number("MASTER_PORT", environ, least=1)
    attempt = f"{environ.get('TORCHELASTIC_RUN_ID', 'none')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return LauncherRank(
        rank=rank,
        size=size,
        host=host,
        port=port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
        attempt=attempt,
    )


def _number(name: str, environ: Mapping[str, str], *, least: int) -> int:
    text = environ[name].strip()
    valid = text.isdecimal() and int(text) >= least
    require(valid, f"the environment variable {name}", f"an integer of at least {least}", repr(text))
    return int(text)


def check_world_size(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Reject a job that a launcher started as one job of many ranks, but that MPI sees as many jobs of one rank.

    Args:
        size: size of MPI's world.
        environ: environment of this process.

    Raises:
        ConfigError: the launcher set more ranks than `size`. The message contains a remedy.
    """
    sizes = {name: environ.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")}
    step = step_place(environ)
    for name, expected in sizes.items():
        if expected.isdecimal() and int(expected) > size:
            raise ConfigError(
                f"the launcher started {expected} ranks ({name}), but MPI_COMM_WORLD has size {size}: the "
                f"{'srun' if step else 'mpiexec'} in use does not work with mpi4py's MPI library; "
                f"{_SRUN_REMEDY if step else _REMEDY.format(size=expected) + ', which finds the right mpiexec'}, "
                "or see `sirtaki doctor`"
            )
    if any(sizes.values()) or size > 1:
        return
    # Accept a Slurm step of one task. It is the step of a batch script or of an interactive shell, so no MPI launcher
    # started it.
    if step is not None:
        raise ConfigError(
            f"srun started {step.size} tasks, but MPI_COMM_WORLD has only one rank in each; {_SRUN_REMEDY}"
        )
    world = environ.get("WORLD_SIZE", "")
    if environ.get("RANK", "").isdecimal() and world.isdecimal() and int(world) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}, but MPI_COMM_WORLD has only one rank, because torchrun or a similar launcher started "
            f"this process without MPI; unset SIRTAKI_CONTROL=mpi, or {_REMEDY.format(size=world)}"
        )
