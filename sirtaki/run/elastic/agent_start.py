"""How the agent of a host is started: as a child on this one, else by the user's command, srun or ssh."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sirtaki.errors import ConfigError

from ..hosts import Host
from ..ssh import OPTIONS

_AGENT = ("-m", "sirtaki.run.elastic.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStart:
    """What the user has said about it.

    Attributes:
        template: a command with `{host}` and `{command}`; "" = ssh, or srun.
        slurm_hosts: those of the allocation that this process runs in.
        ssh: arguments for ssh.
    """

    template: str = ""
    slurm_hosts: frozenset[str] = frozenset()
    ssh: tuple[str, ...] = ()

    def is_child(self, host: str) -> bool:
        """The agent runs on this machine, and inherits its environment."""
        return not self.template and Host(name=host, slots=1).is_local

    def words(self, host: str, environ: Mapping[str, str] = os.environ) -> list[str]:
        """The command line; the agent reads from its standard input.

        Raises:
            ConfigError: the template has no place for the command.
        """
        agent = [sys.executable, *_AGENT]
        if self.is_child(host):
            return agent
        if path := environ.get("PYTHONPATH"):
            agent = ["env", f"PYTHONPATH={path}", *agent]
        if self.template:
            return _filled(self.template, host, agent)
        if host in self.slurm_hosts:
            # All that the job has there, whatever the site or the batch script has set for tasks of its own.
            place = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "--export=ALL"]
            unbound = ["--cpu-bind=none"] if "SLURM_CPU_BIND" in environ else []
            return ["srun", *place, *unbound, "--unbuffered", *agent]
        return ["ssh", *OPTIONS, *self.ssh, host, f"exec {shlex.join(agent)}"]


def _filled(template: str, host: str, agent: Sequence[str]) -> list[str]:
    """`{command}` as a word of its own becomes the agent's words, within a word their quoted form."""
    if "{command}" not in template:
        raise ConfigError(
            f"--agent-command {template!r} has no {{command}}; write for example "
            "'kubectl exec -i {host} -- {command}'"
        )
    words: list[str] = []
    for word in shlex.split(template):
        if word == "{command}":
            words += agent
        else:
            words.append(word.replace("{host}", host).replace("{command}", shlex.join(agent)))
    return words
