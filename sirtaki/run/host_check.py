"""Check whether a host can run ranks: `python -m sirtaki.run.host_check`, with a `Need` as JSON on standard input.

Prints a `HostReport` as a line of JSON. Imports nothing that is slow to load.
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
"""Prefix of a line of standard error that is addressed to the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Requirements of ranks on remote hosts.

    Attributes:
        folder: working directory.
        script: script relative to the working directory. "" for a module or a program that is not Python.
        interfaces: network interfaces, of which one must exist. Empty for any.
        versions: versions that must be equal on all hosts, by name.
    """

    folder: str
    script: str
    interfaces: tuple[str, ...]
    versions: Mapping[str, str]


def versions_here() -> dict[str, str]:
    """Return the versions that must be equal on all hosts."""
    found = {"Sirtaki": sirtaki.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    try:
        found["PyTorch"] = version("torch").partition("+")[0]  # builds for CPU and for CUDA are compatible
    except PackageNotFoundError:
        found["PyTorch"] = "none"
    return found


def interface_problem(interfaces: Sequence[str]) -> str:
    """Return why this host cannot connect through any of these interfaces. "" if it can, or if none are given."""
    known = interface_addresses()
    if not interfaces or any(name in known for name in interfaces):
        return ""
    there = ", ".join(f"{name} ({address})" for name, address in known.items())
    return f"there is no network interface {' or '.join(interfaces)} with an IPv4 address; choose one of {there}"


def problem_here(need: Need) -> str:
    """Return what this host lacks and how to fix it, as one sentence. "" if nothing."""
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
    """Answer of a host to a check.

    Attributes:
        problem: see `problem_here`.
        networks: IPv4 addresses of the host, with the prefix lengths of their networks.
        identity: equal for different names of one host.
    """

    problem: str
    networks: tuple[str, ...] = ()
    identity: str = ""


def finding_here(need: Need) -> HostReport:
    """Check this host, and list its addresses without loopback."""
    networks = tuple(str(each) for each in interface_networks().values() if not each.ip.is_loopback)
    return HostReport(problem=problem_here(need), networks=networks, identity=" ".join(host_identity()))


if __name__ == "__main__":
    print(msgspec.json.encode(finding_here(msgspec.json.decode(sys.stdin.readline(), type=Need))).decode())
