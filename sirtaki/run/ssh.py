"""How other hosts are logged in to, and what to do where that fails."""

from __future__ import annotations

import re
from pathlib import Path

from sirtaki.errors import ConfigError

CONNECT_S = 10
"""How long a host may be silent before it is given up."""

_ALIVE_S, _ALIVE_COUNT = 10, 3

OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", f"ServerAliveInterval={_ALIVE_S}"),
    *("-o", f"ServerAliveCountMax={_ALIVE_COUNT}"),
)
"""Nobody is there to answer a question, and a host that is gone is to be noticed."""

# What ssh or a shell says → what to do, for {host} and {python}. The first that fits counts.
_REMEDIES = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (
            r"Could not resolve hostname",
            "is the name right? The resolver, /etc/hosts or ~/.ssh/config must know it",
        ),
        (r"Connection refused", "start sshd there, or name its port with --ssh-port"),
        (
            r"(Connection|Operation) timed out|No route to host|Network is unreachable",
            "is it switched on, and does no firewall stand between?",
        ),
        (
            r"Host key verification failed|No .* host key is known",
            "log in once by hand, `ssh {host}`, and compare and accept the key of the host",
        ),
        (
            r"Permission denied \(|Too many authentication failures|No supported authentication methods",
            "let your key in there, `ssh-copy-id {host}`, or name another one with --ssh-identity-file; another user "
            "stands in ~/.ssh/config",
        ),
        (r"No module named '?sirtaki", "install Sirtaki there for {python}, the same version as here"),
    )
)


_NO_PROGRAM = re.compile(r"not found|No such file or directory|cannot execute", re.IGNORECASE)


def ssh_arguments(port: int | None, identity_file: str | None) -> tuple[str, ...]:
    """What the user has said of it, for ssh, behind `OPTIONS`.

    Raises:
        ConfigError: there is no such file.
    """
    words = ["-p", str(port)] if port else []
    if identity_file:
        if not Path(identity_file).is_file():
            raise ConfigError(f"--ssh-identity-file {identity_file}: there is no such file")
        words += ["-i", identity_file]
    return tuple(words)


def remedy(line: str, *, host: str, python: str) -> str:
    """What to do about this line of a login's standard error; "" if it says nothing of a failure that is known."""
    for pattern, text in _REMEDIES:
        if pattern.search(line.strip()):
            return text.format(host=host, python=python)
    if python in line and _NO_PROGRAM.search(line):
        return f"the same Python environment must be there as here, with {python}"
    return ""


def why_not(text: str, *, host: str, python: str) -> str:
    """Why a login has failed, and what to do, of what it has written to standard error; "" if nothing known."""
    for line in reversed(text.splitlines()):
        if found := remedy(line, host=host, python=python):
            return f"{line.strip().rstrip('.')}: {found}"
    return ""
