"""Where ranks may run: hosts and their slots, from the command line, a hostfile or a Slurm allocation."""

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sirtaki.errors import ConfigError
from sirtaki.slurm import node_names, step_place, task_counts

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine and how many ranks it takes."""

    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        """Whether this is the machine that launches."""
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", own, own.partition(".")[0]}


def given_hosts(listed: str | None, hostfile: str | None, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts that the user names, else those of a Slurm allocation; empty = this one.

    Raises:
        ConfigError: what is given names no hosts.
    """
    if listed:
        return parse_hosts(listed)
    if hostfile:
        return read_hostfile(Path(hostfile))
    return slurm_hosts(environ)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`node1:4,node2:4` → hosts; without a number a host has one slot.

    Raises:
        ConfigError: a part is not a host, or a number is not a positive one.
    """
    return _merged(_host(part.strip(), place=f"-H {text}") for part in text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """One host a line, `node1 slots=4` or `node1:4`; `#` begins a comment.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line (named by its number) is not a host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"hostfile {path} cannot be read: {err}") from err
    found = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if entry:
            found.append(_host(re.sub(r"\s+slots\s*=\s*", ":", entry), place=f"{path}, line {number}"))
    if not found:
        raise ConfigError(f"hostfile {path} names no host; write one a line, such as: node1 slots=4")
    return _merged(found)


def slurm_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts of the Slurm allocation that this process runs in; empty outside of one.

    Raises:
        ConfigError: srun has started this process as one of several, or on fewer nodes than the job has.
    """
    if (step := step_place(environ)) is not None:
        raise ConfigError(
            f"srun has started sirtakirun {step.size} times; start it once, without srun, in the batch script or the "
            "shell of salloc, or leave it out: `srun python …`"
        )
    names = node_names(environ.get("SLURM_JOB_NODELIST", ""))
    if not names:
        return ()
    slots = task_counts(environ, "SLURM_TASKS_PER_NODE")
    if len(slots) != len(names):
        raise ConfigError(
            f"the Slurm job has {len(names)} nodes, but SLURM_TASKS_PER_NODE="
            f"{environ.get('SLURM_TASKS_PER_NODE', '')!r} is for {len(slots)}; start sirtakirun without srun, in the "
            "batch script or the shell of salloc"
        )
    return tuple(Host(name=name, slots=count) for name, count in zip(names, slots, strict=True))


def _host(text: str, *, place: str) -> Host:
    name, colon, slots = text.partition(":")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: {text!r} is not a host; write name:slots, or in a hostfile: name slots=4")
    if colon and not (slots.isdecimal() and int(slots) > 0):
        raise ConfigError(f"{place}: {slots!r} is not a number of slots (1 or more) for {name}")
    return Host(name=name, slots=int(slots) if colon else 1)


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """A host that is named again gets more slots, as with mpiexec."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name=name, slots=count) for name, count in slots.items())
