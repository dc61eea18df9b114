"""Before mpiexec starts anything on other hosts: whether they can be logged in to, and have what ranks need.

mpiexec itself says of a host that it cannot use little more than its name, after a minute where the host is silent.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Interface

from .host_check import Finding, Need
from .hosts import Host
from .ssh import why_not

LIMIT_S = 30.0
"""How long a host may take to answer; then mpiexec may try."""

_AT_ONCE = 32

_BATCH_SYSTEMS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_OTHER_AGENTS = ("plm_ssh_agent", "plm_rsh_agent", "HYDRA_LAUNCHER")


def is_by_ssh(environ: Mapping[str, str], mpi_args: str) -> bool:
    """Whether mpiexec will start its daemons by plain ssh, as far as can be known."""
    if any(name in environ for name in _BATCH_SYSTEMS) or shutil.which("ssh") is None:
        return False
    given = [mpi_args, *(name for name in environ if not name.startswith("HYDRA_LAUNCHER_EXTRA_ARGS"))]
    return not any(agent in text for agent in _OTHER_AGENTS for text in given)


def look_at(
    hosts: Sequence[Host], need: Need, *, python: str, ssh: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Finding]:
    """What all these hosts say of themselves, by ssh and at once; of those that cannot be asked, why.

    Args:
        hosts: others than this one.
        need: what they must have.
        python: interpreter of the ranks.
        ssh: arguments for ssh.
        environ: of the ranks.
    """
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        names = [host.name for host in hosts]
        ask = partial(_ask, need=need, python=python, ssh=ssh, environ=environ)
        return dict(zip(names, pool.map(ask, names), strict=True))


def shared_networks(found: Iterable[Finding]) -> tuple[str, ...]:
    """Networks in which hosts have the same addresses only, as those of container engines: they join nobody."""
    hosts = {each.identity: {IPv4Interface(text) for text in each.networks} for each in found}
    counts = Counter(address for addresses in hosts.values() for address in addresses)
    own = {address.network for address, count in counts.items() if count == 1}
    shared = {address.network for address, count in counts.items() if count > 1}
    return tuple(sorted(map(str, shared - own)))


def _ask(host: str, *, need: Need, python: str, ssh: Sequence[str], environ: Mapping[str, str]) -> Finding:
    path = [f"PYTHONPATH={environ['PYTHONPATH']}"] if environ.get("PYTHONPATH") else []
    there = shlex.join(["env", *path, python, "-m", "sirtaki.run.host_check"])
    try:
        asked = subprocess.run(
            ["ssh", *ssh, host, f"exec {there}"],
            input=f"{need.as_json()}\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding(problem="")
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"ssh ended with exit code {asked.returncode}"])[-1]
        problem = why_not(asked.stderr, host=host, python=python) or f"{last}; see `ssh {host}`"
        return Finding(problem=problem)
    try:
        values = json.loads(asked.stdout.strip().splitlines()[-1])  # a login may write before
        return Finding(problem=values["problem"], networks=tuple(values["networks"]), identity=values["identity"])
    except (ValueError, KeyError, IndexError, TypeError):
        return Finding(problem="")
