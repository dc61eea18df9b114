"""Who has started this process: Open MPI, MPICH, Slurm, torchrun, an agent."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sirtaki.errors import ConfigError

_FIRST_PORT, _PORTS = 20011, 10007  # below the kernel's own choices; a prime, so that neighbouring jobs differ

_NEARER = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "TORCHELASTIC_RUN_ID")
"""Of launchers whose daemons srun has started: its place is the daemon's then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a process among the ranks, as torchrun's variables, or Slurm's, give it.

    Attributes:
        host, port: where the ranks meet; "" and 0 for a rank alone.
        attempt: names the job and its start among restarts.
        agent_store: torchrun keeps the store; else rank 0 opens it.
        local_rank, local_size: on its node; of a task of srun only.
    """

    rank: int
    size: int
    host: str
    port: int
    attempt: str
    agent_store: bool = False
    local_rank: int | None = None
    local_size: int | None = None


def step_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """The place of one of several tasks of an srun, which meet at its first node, at a port that no other step has.

    None if srun has started one task only, or a launcher that started this process in turn.

    Raises:
        ConfigError: Slurm's variables contradict each other.
    """
    # SLURM_NTASKS stands in every process of an allocation; this in a step's only.
    size = _slurm_number(environ, "SLURM_STEP_NUM_TASKS")
    if size < 2 or any(name in environ for name in _NEARER):
        return None
    tasks = task_counts(environ, "SLURM_STEP_TASKS_PER_NODE")
    node, nodes = _slurm_number(environ, "SLURM_NODEID"), node_names(environ.get("SLURM_STEP_NODELIST", ""))
    if node >= len(tasks) or not nodes:
        raise ConfigError(
            f"SLURM_NODEID={node} does not go with SLURM_STEP_TASKS_PER_NODE="
            f"{environ.get('SLURM_STEP_TASKS_PER_NODE', '')!r} and SLURM_STEP_NODELIST="
            f"{environ.get('SLURM_STEP_NODELIST', '')!r}; srun sets them, nothing else should"
        )
    job, step = _slurm_number(environ, "SLURM_JOB_ID"), _slurm_number(environ, "SLURM_STEP_ID")
    return Place(
        rank=_slurm_number(environ, "SLURM_PROCID"),
        size=size,
        host=nodes[0],
        port=_FIRST_PORT + (31 * job + step) % _PORTS,
        attempt=f"slurm/{job}.{step}/{_slurm_number(environ, 'SLURM_RESTART_COUNT')}",
        local_rank=_slurm_number(environ, "SLURM_LOCALID"),
        local_size=tasks[node],
    )


def task_counts(environ: Mapping[str, str], name: str) -> list[int]:
    """`2(x3),1` → 2, 2, 2, 1: tasks on each node, as that variable has them.

    Raises:
        ConfigError: it is not of this form.
    """
    text = environ.get(name, "1")
    counts: list[int] = []
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if matched is None:
            raise ConfigError(f"{name}={text!r} is not of the form 2(x3),1")
        counts += [int(matched[1])] * int(matched[2] or 1)
    return counts


def node_names(text: str) -> list[str]:
    """Slurm's `gpu[01-03,7],login` → `gpu01 gpu02 gpu03 gpu7 login`."""
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


# Open MPI, Hydra (MPICH, Intel MPI), PMIx.
_PLACES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}

# Of any mpiexec, or a batch system that starts ranks of MPI as one: these, MVAPICH, Cray's and IBM's.
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
"""What scripts for Horovod read, by quantity."""

TORCH_NAMES = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
"""What `torch.distributed.init_process_group()` and scripts for torchrun read, by quantity."""

AGENT = "SIRTAKI_AGENT"
"""In ranks that come and go: the descriptor through which they talk to the agent that has started them."""

BAR = "SIRTAKI_BAR"
"""Set by a launcher that draws a bar of progress for its ranks."""

_REMEDY = "start it with `sirtakirun -np {size} python …`"
_SRUN_REMEDY = (
    "set SIRTAKI_CONTROL=mesh, which needs no MPI, or use `srun --mpi=pmix` (`srun --mpi=list` says what is there)"
)


def place(name: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """RANK, SIZE, LOCAL_RANK or LOCAL_SIZE as the launcher has it, None where it does not tell."""
    found = next((int(environ[key]) for key in _PLACES[name] if environ.get(key, "").isdecimal()), None)
    if found is None and (step := step_place(environ)) is not None:
        return int(getattr(step, name.lower()))
    return found


def started_by_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """The nearest launcher is torchrun: sirtakirun takes its variables out."""
    return "TORCHELASTIC_RUN_ID" in environ


def started_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """An mpiexec has started this process, or a batch system has that serves MPI."""
    return any(name in environ for name in _OF_MPI)


def started_by_srun(environ: Mapping[str, str] = os.environ) -> bool:
    """One of several tasks of srun."""
    return step_place(environ) is not None


def torch_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """What torchrun, or whoever sets the same variables, says, else srun; None if nobody does.

    Raises:
        ConfigError: a variable is missing or disagrees with another one; with the remedy.
    """
    if not (environ.get("RANK", "") and environ.get("WORLD_SIZE", "")):
        step = step_place(environ)
        if step is not None and environ.get("MASTER_ADDR"):
            step = replace(step, host=environ["MASTER_ADDR"])
        if step is not None and environ.get("MASTER_PORT"):
            step = replace(step, port=_number("MASTER_PORT", environ, least=1))
        return step
    rank, size = _number("RANK", environ, least=0), _number("WORLD_SIZE", environ, least=1)
    if rank >= size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={size}: ranks are numbered from 0")
    local, local_size = environ.get("LOCAL_RANK", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if local and local_size:
        if _number("LOCAL_RANK", environ, least=0) >= _number("LOCAL_WORLD_SIZE", environ, least=1):
            raise ConfigError(f"LOCAL_RANK={local} is not below LOCAL_WORLD_SIZE={local_size}")
        if int(local_size) > size:
            raise ConfigError(f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={size}")
    host, port = environ.get("MASTER_ADDR", ""), 0
    if size > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={size} says {size} ranks, but not {' nor '.join(missing)}, so they cannot find "
                "each other; start them with torchrun or sirtakirun, or set it (if this process is meant to be alone: "
                "unset RANK and WORLD_SIZE)"
            )
        port = _number("MASTER_PORT", environ, least=1)
    attempt = f"{environ.get('TORCHELASTIC_RUN_ID', 'none')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Place(
        rank=rank,
        size=size,
        host=host,
        port=port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
        attempt=attempt,
    )


def _number(name: str, environ: Mapping[str, str], *, least: int) -> int:
    text = environ[name].strip()
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}={text!r} is no whole number from {least}; torchrun sets it, or you do")
    return int(text)


def check_world_size(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Refuses to train as many jobs of one rank, where a launcher has meant one job of many.

    Args:
        size: of MPI's world.
        environ: of the process.

    Raises:
        ConfigError: the launcher says more than `size`; with the remedy.
    """
    told = {name: environ.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")}
    step = step_place(environ)
    for name, expected in told.items():
        if expected.isdecimal() and int(expected) > size:
            raise ConfigError(
                f"{name} says {expected} ranks, but MPI's world has {size}: this {'srun' if step else 'mpiexec'} does "
                f"not {'speak to' if step else 'belong to'} the MPI library that mpi4py loads; "
                f"{_SRUN_REMEDY if step else _REMEDY.format(size=expected) + ', which finds the right one'}, "
                "or see `sirtaki doctor`"
            )
    if any(told.values()) or size > 1:
        return
    # No MPI launcher has started this process; a batch script's or an interactive shell's step has one task.
    if step is not None:
        raise ConfigError(f"srun has started {step.size} tasks, but each is alone in its MPI world; {_SRUN_REMEDY}")
    world = environ.get("WORLD_SIZE", "")
    if environ.get("RANK", "").isdecimal() and world.isdecimal() and int(world) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world} says {world} ranks, but this process is alone in its MPI world, as under torchrun; "
            f"leave out SIRTAKI_CONTROL=mpi, or {_REMEDY.format(size=world)}"
        )
