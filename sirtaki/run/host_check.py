"""Check whether a host can run ranks: `python -m sirtaki.run.host_check`, with a `Need` as JSON on standard input.

The program prints a `HostReport` as a line of JSON. It imports nothing that is slow to load.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

import sirtaki
from sirtaki.machine import host_identity, interface_addresses, interface_networks

PROBLEM = "\x1ehost: "
"""Prefix of a line on standard error with which a host reports a problem to the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Requirements of ranks on remote hosts.

    Attributes:
        folder: working directory of the ranks.
        script: path of the Python script, relative to `folder`. "" if the ranks run a module or another program.
        interfaces: names of network interfaces, one of which must exist on the host. Empty = no requirement.
        versions: versions that the host must have, by name of the package.
    """

    folder: str
    script: str
    interfaces: tuple[str, ...]
    versions: Mapping[str, str]


def versions_here() -> dict[str, str]:
    """Return the versions on this host of Python and of packages whose versions must be equal on all hosts."""
    found = {"Sirtaki": sirtaki.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    try:
        # Remove the build tag, such as "+cpu": builds for CPU and for CUDA are compatible.
        found["PyTorch"] = version("torch").partition("+")[0]
    except PackageNotFoundError:
        found["PyTorch"] = "none"
    return found


def interface_problem(interfaces: Sequence[str]) -> str:
    """Return why this host cannot connect through any of these interfaces. "" if this host can, or if `interfaces` is
    empty.
    """
    known = interface_addresses()
    if not interfaces or any(name in known for name in interfaces):
        return ""
    there = ", ".join(f"{name} ({address})" for name, address in known.items())
    return f"there is no network interface {' or '.join(interfaces)} with an IPv4 address; choose one of {there}"


def problem_here(need: Need) -> str:
    """Return which requirement this host does not meet and how to solve this, as one sentence. "" if the host meets
    all.
    """
    here = versions_here()
    for name, wanted in need.versions.items():
        if here.get(name) != wanted:
            return (
                f"it has {name} {here.get(name)}, but the launcher has {wanted}: install the same version for "
                f"{sys.executable}"
            )
    if need.script and not Path(need.folder, need.script).exists():
        return f"there is no script {Path(need.folder, need.script)}: copy it there, or use a shared file system"
    return interface_problem(need.interfaces)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Result of the check of one host.

    Attributes:
        problem: requirement that the host does not meet, and a remedy, as one sentence. "" if the host meets all.
        networks: IPv4 addresses of the host, with the prefix lengths of their networks.
        identity: id of the host, equal for different names of the same host.
    """

    problem: str
    networks: tuple[str, ...] = ()
    identity: str = ""


def finding_here(need: Need) -> HostReport:
    """Check this host, and return the result with all addresses of the host except loopback."""
    networks = tuple(str(each) for each in interface_networks().values() if not each.ip.is_loopback)
    return HostReport(problem=problem_here(need), networks=networks, identity=" ".join(host_identity()))


if __name__ == "__main__":
    print(msgspec.json.encode(finding_here(msgspec.json.decode(sys.stdin.readline(), type=Need))).decode())
