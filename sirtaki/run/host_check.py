"""Whether a host has what a rank needs: `python -m sirtaki.run.host_check`, with a `Need` as JSON on standard input.

Nothing is loaded that takes long. The answer, a line of JSON on standard output, is a `Finding`.
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
"""Begins a line of standard error that is for the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What ranks need that run on other hosts.

    Attributes:
        folder: where they run.
        script: what they run, seen from there; "" = a module, or no Python.
        interfaces: network interfaces of which there must be one; empty = any.
        versions: of what must be the same everywhere, by name.
    """

    folder: str
    script: str
    interfaces: tuple[str, ...]
    versions: Mapping[str, str]


def versions_here() -> dict[str, str]:
    """Of what must be the same on all hosts."""
    found = {"Sirtaki": sirtaki.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    try:
        found["PyTorch"] = version("torch").partition("+")[0]  # for a CPU or for CUDA, it speaks the same protocol
    except PackageNotFoundError:
        found["PyTorch"] = "none"
    return found


def interface_problem(interfaces: Sequence[str]) -> str:
    """Why this host cannot connect through these interfaces; "" if it can through one of them, or none is named."""
    known = interface_addresses()
    if not interfaces or any(name in known for name in interfaces):
        return ""
    there = ", ".join(f"{name} ({address})" for name, address in known.items())
    return (
        f"there is no network interface {' or '.join(interfaces)} with an IPv4 address, but {there}: name one of these"
    )


def problem_here(need: Need) -> str:
    """What this host lacks, and what to do, as one sentence; "" if nothing."""
    here = versions_here()
    for name, wanted in need.versions.items():
        if here.get(name) != wanted:
            return (
                f"{name} {here.get(name)} is there, and {wanted} where the job is started: install the same for "
                f"{sys.executable}"
            )
    if need.script and not Path(need.folder, need.script).exists():
        return f"there is no script {Path(need.folder, need.script)}: copy it there, or put it where all hosts see it"
    return interface_problem(need.interfaces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a host says of itself.

    Attributes:
        problem: see `problem_here`.
        networks: its IPv4 addresses, each with the length of its network's prefix.
        identity: equal for names of one host.
    """

    problem: str
    networks: tuple[str, ...] = ()
    identity: str = ""


def finding_here(need: Need) -> Finding:
    """What this host says of itself; of its addresses not those of loopback."""
    networks = tuple(str(each) for each in interface_networks().values() if not each.ip.is_loopback)
    return Finding(problem=problem_here(need), networks=networks, identity=" ".join(host_identity()))


if __name__ == "__main__":
    print(msgspec.json.encode(finding_here(msgspec.json.decode(sys.stdin.readline(), type=Need))).decode())
