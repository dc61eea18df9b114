"""What Slurm tells a process in environment variables: about its job, and its place among the tasks of an srun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sirtaki.errors import ConfigError

_FIRST_PORT, _PORTS = 20011, 10007  # below the kernel's own choices; a prime, so that neighbouring jobs differ

_NEARER = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "TORCHELASTIC_RUN_ID")
"""Of launchers whose daemons srun has started: its place is the daemon's then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """The place of one of several tasks of an srun.

    Attributes:
        local_rank, local_size: on its node.
        first_node: where rank 0 is.
        job, step: ids, the job's being one of a job array's.
        restarts: how often the job has been requeued.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    first_node: str
    job: int
    step: int
    restarts: int

    @property
    def port(self) -> int:
        """At which the ranks can meet: all know it, and steps that run at once have others."""
        return _FIRST_PORT + (31 * self.job + self.step) % _PORTS

    @property
    def name(self) -> str:
        """No other step has it, nor this one after a requeue."""
        return f"slurm/{self.job}.{self.step}/{self.restarts}"


def step_place(environ: Mapping[str, str] = os.environ) -> StepPlace | None:
    """Of this process; None if srun has started one task only, or a launcher that started this process in turn.

    Raises:
        ConfigError: Slurm's variables contradict each other.
    """
    # SLURM_NTASKS stands in every process of an allocation; this in a step's only.
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    if size < 2 or any(name in environ for name in _NEARER):
        return None
    tasks = task_counts(environ, "SLURM_STEP_TASKS_PER_NODE")
    node, nodes = _number(environ, "SLURM_NODEID"), node_names(environ.get("SLURM_STEP_NODELIST", ""))
    if node >= len(tasks) or not nodes:
        raise ConfigError(
            f"SLURM_NODEID={node} does not go with SLURM_STEP_TASKS_PER_NODE="
            f"{environ.get('SLURM_STEP_TASKS_PER_NODE', '')!r} and SLURM_STEP_NODELIST="
            f"{environ.get('SLURM_STEP_NODELIST', '')!r}; srun sets them, nothing else should"
        )
    return StepPlace(
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=tasks[node],
        first_node=nodes[0],
        job=_number(environ, "SLURM_JOB_ID"),
        step=_number(environ, "SLURM_STEP_ID"),
        restarts=_number(environ, "SLURM_RESTART_COUNT"),
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


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
