"""Parse host lists, build ssh arguments, and check by ssh whether ranks can start on the hosts."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Interface
from pathlib import Path

import msgspec

from sirtaki.engine.launchers import node_names, step_place, task_counts
from sirtaki.errors import ConfigError, require

from .host_check import HostReport, Need

MOST_SLOTS = 4096
"""Maximum number of slots of a host. A larger number is rejected as a mistake, because it would take much memory."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host name, and the number of ranks that the host may run (slots)."""

    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        """Return whether this host is the machine on which the launcher runs."""
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", own, own.partition(".")[0]}


def given_hosts(listed: str | None, hostfile: str | None, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts that the user has listed. If there are none, return the hosts of the Slurm allocation.

    The result is empty if the job runs only on this host.

    Raises:
        ConfigError: the input names no hosts.
    """
    if listed:
        return parse_hosts(listed)
    if hostfile:
        return read_hostfile(Path(hostfile))
    return slurm_hosts(environ)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `node1:4,node2:4`. A host without a number of slots has one slot.

    Raises:
        ConfigError: a part is not a host, or a number is not positive.
    """
    return _merged(_host(part.strip(), place=f"-H {text}") for part in text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a file with one host per line, `node1 slots=4` or `node1:4`, and `#` comments.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is not a host. The message contains the line number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"the hostfile {path} cannot be read: {err}") from err
    found = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if entry:
            found.append(_host(re.sub(r"\s+slots\s*=\s*", ":", entry), place=f"line {number} of {path}"))
    if not found:
        raise ConfigError(f"the hostfile {path} names no host; write one host per line, such as: node1 slots=4")
    return _merged(found)


def slurm_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of the Slurm allocation in which this process runs. Empty outside an allocation.

    Raises:
        ConfigError: srun started this process as one of several, or on fewer nodes than the job has.
    """
    if (step := step_place(environ)) is not None:
        raise ConfigError(
            f"srun started sirtakirun {step.size} times; start it once, without srun, in the batch script or the "
            "shell of salloc, or use srun without sirtakirun: `srun python …`"
        )
    names = node_names(environ.get("SLURM_JOB_NODELIST", ""))
    if not names:
        return ()
    slots = task_counts(environ, "SLURM_TASKS_PER_NODE")
    if len(slots) != len(names):
        raise ConfigError(
            f"the Slurm job has {len(names)} nodes, but SLURM_TASKS_PER_NODE="
            f"{environ.get('SLURM_TASKS_PER_NODE', '')!r} is for {len(slots)} nodes; start sirtakirun without "
            "srun, in the batch script or the shell of salloc"
        )
    return tuple(Host(name=name, slots=count) for name, count in zip(names, slots, strict=True))


def _host(text: str, *, place: str) -> Host:
    name, colon, slots = text.partition(":")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the host {text!r} in {place} is invalid; write name:slots, or name slots=4 in a hostfile")
    valid = slots.isdecimal() and len(slots) <= len(str(MOST_SLOTS)) and 1 <= int(slots) <= MOST_SLOTS
    require(not colon or valid, f"slots of host {name} in {place}", f"an integer from 1 to {MOST_SLOTS}", repr(slots))

    return Host(name=name, slots=int(slots) if colon else 1)


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Merge hosts that are listed several times, and add up their slots (numbers of ranks), as mpiexec does."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name=name, slots=count) for name, count in slots.items())


CONNECT_S = 10
"""Seconds without an answer after which ssh gives up a host."""

_ALIVE_S, _ALIVE_COUNT = 10, 3

OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", f"ServerAliveInterval={_ALIVE_S}"),
    *("-o", f"ServerAliveCountMax={_ALIVE_COUNT}"),
)
"""Options for every ssh: never ask for a password, because no user can answer, and detect a lost host."""

# Patterns of error messages of ssh or a shell, each with its remedy. In a remedy, {host} and {python} are replaced. The
# first pattern that matches counts.
_REMEDIES = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (r"Could not resolve hostname", "check the name; the resolver, /etc/hosts or ~/.ssh/config must contain it"),
        (r"Connection refused", "start sshd there, or set its port with --ssh-port"),
        (
            r"(Connection|Operation) timed out|No route to host|Network is unreachable",
            "check that it is running and that no firewall blocks the connection",
        ),
        (
            r"Host key verification failed|No .* host key is known",
            "log in once manually, `ssh {host}`, then compare and accept the key of the host",
        ),
        (
            r"Permission denied \(|Too many authentication failures|No supported authentication methods",
            "install your key there, `ssh-copy-id {host}`, or choose another key with --ssh-identity-file; set another "
            "user in ~/.ssh/config",
        ),
        (r"No module named '?sirtaki", "install the same version of Sirtaki there for {python}"),
    )
)


_NO_PROGRAM = re.compile(r"not found|No such file or directory|cannot execute", re.IGNORECASE)


def ssh_arguments(port: int | None, identity_file: str | None) -> tuple[str, ...]:
    """Return ssh arguments for the user's port and identity file. They are used after `OPTIONS`.

    Raises:
        ConfigError: the identity file does not exist.
    """
    words = ["-p", str(port)] if port else []
    if identity_file:
        if not Path(identity_file).is_file():
            raise ConfigError(f"the file {identity_file} given with --ssh-identity-file does not exist")
        words += ["-i", identity_file]
    return tuple(words)


def remedy(line: str, *, host: str, python: str) -> str:
    """Return what the user can do about a failure that ssh reports in `line`.

    "" if the line reports no known failure.
    """
    for pattern, text in _REMEDIES:
        if pattern.search(line.strip()):
            return text.format(host=host, python=python)
    if python in line and _NO_PROGRAM.search(line):
        return f"install the same Python environment there, with {python}"
    return ""


def why_not(text: str, *, host: str, python: str) -> str:
    """Return why an ssh login failed, with a remedy. "" if `text`, the standard error of ssh, contains no known
    cause.
    """
    for line in reversed(text.splitlines()):
        if found := remedy(line, host=host, python=python):
            return f"{line.strip().rstrip('.')}: {found}"
    return ""


LIMIT_S = 30.0
"""Time limit in seconds for a host's answer to the check by ssh. If the host does not answer in time, the launcher
continues without the check, and mpiexec tries to reach the host.
"""

_AT_ONCE = 32

_BATCH_SYSTEMS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_OTHER_AGENTS = ("plm_ssh_agent", "plm_rsh_agent", "HYDRA_LAUNCHER")


def is_by_ssh(environ: Mapping[str, str], mpi_args: str) -> bool:
    """Return whether mpiexec will probably start its daemons on other hosts by plain ssh."""
    if any(name in environ for name in _BATCH_SYSTEMS) or shutil.which("ssh") is None:
        return False
    given = [mpi_args, *(name for name in environ if not name.startswith("HYDRA_LAUNCHER_EXTRA_ARGS"))]
    return not any(agent in text for agent in _OTHER_AGENTS for text in given)


def look_at(
    hosts: Sequence[Host], need: Need, *, python: str, ssh: Sequence[str], environ: Mapping[str, str]
) -> dict[str, HostReport]:
    """Run `host_check` on all hosts in parallel, by ssh. The report of an unreachable host contains the problem.

    Args:
        hosts: hosts other than this one.
        need: requirements for the hosts.
        python: interpreter of the ranks.
        ssh: arguments for ssh.
        environ: environment of the ranks.
    """
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        names = [host.name for host in hosts]
        ask = partial(_ask, need=need, python=python, ssh=ssh, environ=environ)
        return dict(zip(names, pool.map(ask, names), strict=True))


def shared_networks(found: Iterable[HostReport]) -> tuple[str, ...]:
    """Return the networks in which all hosts have the same address. Such a network does not connect the hosts.

    Container engines create such networks on each host.
    """
    hosts = {each.identity: {IPv4Interface(text) for text in each.networks} for each in found}
    counts = Counter(address for addresses in hosts.values() for address in addresses)
    own = {address.network for address, count in counts.items() if count == 1}
    shared = {address.network for address, count in counts.items() if count > 1}
    return tuple(sorted(map(str, shared - own)))


def _ask(host: str, *, need: Need, python: str, ssh: Sequence[str], environ: Mapping[str, str]) -> HostReport:
    path = [f"PYTHONPATH={environ['PYTHONPATH']}"] if environ.get("PYTHONPATH") else []
    there = shlex.join(["env", *path, python, "-P", "-m", "sirtaki.run.host_check"])
    try:
        asked = subprocess.run(
            ["ssh", *ssh, host, f"exec {there}"],
            input=f"{msgspec.json.encode(need).decode()}\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return HostReport(problem="")
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"ssh ended with exit code {asked.returncode}"])[-1]
        problem = why_not(asked.stderr, host=host, python=python) or f"{last}; see `ssh {host}`"
        return HostReport(problem=problem)
    try:
        return msgspec.json.decode(
            asked.stdout.strip().splitlines()[-1], type=HostReport
        )  # Search for the report, because the login shell may print text before it.
    except (ValueError, IndexError):
        return HostReport(problem="")
