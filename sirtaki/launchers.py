"""What launchers tell a process about its place in a job, in environment variables."""

import os
from collections.abc import Mapping

from sirtaki.errors import ConfigError

# Open MPI, Hydra (MPICH, Intel MPI), PMIx, Slurm.
_PLACES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"),
    "SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}

HOROVOD_NAMES = {name: f"HOROVOD_{name}" for name in _PLACES}
"""What scripts for Horovod read, by quantity."""

TORCH_NAMES = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
"""What `torch.distributed.init_process_group()` and scripts for torchrun read, by quantity."""

_REMEDY = "start it with `sirtakirun -np {size} python …`"


def place(name: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """RANK, SIZE, LOCAL_RANK or LOCAL_SIZE as the launcher has it, None where it does not tell."""
    return next((int(environ[key]) for key in _PLACES[name] if environ.get(key, "").isdecimal()), None)


def check_world_size(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Refuses to train as many jobs of one rank, where a launcher has meant one job of many.

    Args:
        size: of MPI's world.
        environ: of the process.

    Raises:
        ConfigError: the launcher says more than `size`; with the remedy.
    """
    told = {name: environ.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")}
    for name, expected in told.items():
        if expected.isdecimal() and int(expected) > size:
            raise ConfigError(
                f"{name} says {expected} ranks, but MPI's world has {size}: this mpiexec (or srun) does not belong "
                f"to the MPI library that mpi4py loads; {_REMEDY.format(size=expected)}, which finds the right one, "
                "or see `sirtaki doctor`"
            )
    if any(told.values()) or size > 1:
        return
    # No MPI launcher has started this process. SLURM_NTASKS stands in every process of an allocation; only srun
    # writes how many tasks a step has, and a batch script's or an interactive shell's step has one.
    steps = environ.get("SLURM_STEP_NUM_TASKS", "")
    if steps.isdecimal() and int(steps) > 1:
        raise ConfigError(
            f"srun has started {steps} tasks, but each is alone in its MPI world; use `srun --mpi=pmix` (`srun "
            f"--mpi=list` says what is there), or in the allocation {_REMEDY.format(size=steps)}"
        )
    world = environ.get("WORLD_SIZE", "")
    if environ.get("RANK", "").isdecimal() and world.isdecimal() and int(world) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world} says {world} ranks, but this process is alone in its MPI world, as under torchrun; "
            f"{_REMEDY.format(size=world)} (if it is meant to be alone: unset RANK and WORLD_SIZE)"
        )
