"""Where ranks may run: hosts and their slots, from the command line, a hostfile or a Slurm allocation."""

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sirtaki.errors import ConfigError

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
        ConfigError: Slurm's variables contradict each other.
    """
    names = _expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))
    if not names:
        return ()
    tasks = environ.get("SLURM_TASKS_PER_NODE", "1")
    slots: list[int] = []
    for part in tasks.split(","):  # `2(x3),1` = 2, 2, 2, 1
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if matched is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={tasks!r} is not of the form 2(x3),1")
        slots += [int(matched[1])] * int(matched[2] or 1)
    if len(slots) != len(names):
        raise ConfigError(f"Slurm names {len(names)} nodes but SLURM_TASKS_PER_NODE={tasks!r} is for {len(slots)}")
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


def _expand_nodes(text: str) -> list[str]:
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
                names += _expand_nodes(f"{before}{number:0{len(first)}d}{after}")
    return names
