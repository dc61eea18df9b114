"""A Slurm cluster on this machine, for tests: its daemons with a folder, ports and a munge key of their own.

Nodes have host names of their own, in namespaces, where those are allowed; else the one node is this machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from sirtaki.machine import ReservedPorts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
CPUS = 8
"""Declared processors of each node, independent of the machine."""

_START_S, _END_S = 30.0, 10.0
_PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def why_unavailable() -> str | None:
    """Why there can be no cluster on this machine, or None if there can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"not installed: {', '.join(missing)} (packages slurmctld, slurmd, slurm-client, munge)" if missing else None


def has_namespaces() -> bool:
    """Nodes may have host names and shared memory of their own."""
    tried = subprocess.run(_on_node("node1", Path("/etc/hosts"), "true"), capture_output=True, check=False)
    return tried.returncode == 0


def _on_node(node: str, hosts: Path, *words: str) -> list[str]:
    """Return a command that runs in namespaces with this host name and separate shared memory."""
    mounts = f"mount --bind {hosts} /etc/hosts && mount -t tmpfs tmpfs /dev/shm"
    return [
        *("unshare", "--uts", "--mount", "--ipc"),
        *("sh", "-c", f'hostname {node} && {mounts} && exec "$@"', "sh", *words),
    ]


class SlurmCluster:
    """One cluster; `with` starts and ends it.

    Attributes:
        folder: where all of it is.
        nodes: their names.
        environ: in which Slurm's commands find it.
    """

    def __init__(self) -> None:
        # munged wants its socket where everybody may reach it, which pytest's own folders are not; and a short path.
        self.folder = Path(tempfile.mkdtemp(prefix="sirtaki-slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        self._own_names = has_namespaces()
        self.nodes = ["node1", "node2"] if self._own_names else [socket.gethostname()]
        self.environ = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._ports = ReservedPorts(1 + len(self.nodes))

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            self._start_munged()
            self._start("slurmctld", "-D", "-c")
            for node in self.nodes:
                self.start_node(node)
            self.wait_for(self.is_idle, _START_S, "idle nodes")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def is_idle(self) -> bool:
        """All nodes are there, and nothing runs on them."""
        return self.ask("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(self.nodes)

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        words = ["slurmd", "-D", "-N", node]
        self._start(*(_on_node(node, self.folder / "hosts", *words) if self._own_names else words))

    def kill_node(self, node: str) -> None:
        """Its slurmd and all that runs there vanish at once, as when a machine loses its power."""
        for pid, environ, words in list(self._processes()):
            if environ.get("SLURMD_NODENAME") == node or (node in words and "slurmd" in words[0]):
                _kill(pid)

    def ask(self, *words: object, check: bool = True) -> str:
        """Run one of Slurm's commands, and return its output."""
        done = subprocess.run(
            list(map(str, words)), env=self.environ, capture_output=True, text=True, timeout=30, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(
        self, script: Path, *options: str, words: Sequence[Path], environ: Mapping[str, str], folder: Path
    ) -> Job:
        """Submit a script by sbatch, with `words`. Its output is in `folder`."""
        done = subprocess.run(
            ["sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/slurm-%A.%a.txt", "--open-mode=append",
             *options, str(script), *map(str, words)],
            env={**self.environ, **environ},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), folder)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Until it holds.

        Raises:
            AssertionError: it does not in time.
        """
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end_s, f"no {what} within {timeout_s:g} s\n{self.logs()}"
            time.sleep(0.1)

    def processes(self) -> list[str]:
        """Return the command lines of processes that jobs run or have left."""
        return [" ".join(words) for _, environ, words in self._processes() if "SLURM_JOB_ID" in environ]

    def shared(self) -> str:
        """Shared memory and semaphores on all nodes, where they have their own."""
        if not self._own_names:
            return ""
        look = "ls -A /dev/shm; tail -qn +2 /proc/sysvipc/sem /proc/sysvipc/shm /proc/sysvipc/msg"
        return self.ask("srun", f"--nodes={len(self.nodes)}", "--ntasks-per-node=1", "sh", "-c", look)

    def logs(self) -> str:
        """Return the last lines of all daemons' logs."""
        return "\n".join(f"── {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))

    def _configure(self) -> None:
        (self.folder / "state").mkdir()
        (self.folder / "spool").mkdir()
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(self.nodes)} {socket.gethostname()}\n")
        controller, *ports = range(self._ports.first, self._ports.first + 1 + len(self.nodes))
        lines = [
            "ClusterName=sirtaki",
            f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"AuthInfo=socket={self.folder}/munge.socket",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/spool/%n",
            f"TmpFS={self.folder}/tmp/%n",  # else PMIx's folders of two nodes are one
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log",
            f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            # Nothing that a container may lack: no cgroups, no binding, more processors than there are.
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "KillWait=5",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
        ]
        for node, port in zip(self.nodes, ports, strict=True):
            (self.folder / "tmp" / node).mkdir(parents=True)
            host = socket.gethostname()
            lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}")
        lines.append("PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = (f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed"))
        self._start("munged", "--foreground", "--force", *files, f"--socket={self.folder}/munge.socket")
        self.wait_for(self.folder.joinpath("munge.socket").exists, _START_S, "socket of munged")

    def _start(self, *words: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            environ = {name: value for name, value in self.environ.items() if not name.startswith("SIRTAKI_")}
            self._daemons.append(subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def _end(self) -> None:
        """End jobs, then daemons, then remaining processes."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired, AssertionError):
            self.ask("scancel", "--user=root", check=False)
            self.wait_for(self.is_idle, _END_S, "end of all jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(_END_S)
        self._ports.close()
        for pid, _, _ in list(self._processes()):
            _kill(pid)
        for daemon in self._daemons:
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self) -> Iterator[tuple[int, dict[str, str], Sequence[str]]]:
        """Yield process, environment and command line of this cluster's daemons and jobs."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                environ = _split(entry / "environ")
                own = dict(part.partition("=")[::2] for part in environ)
                if own.get("SLURM_CONF") == self.environ["SLURM_CONF"]:
                    yield int(entry.name), own, _split(entry / "cmdline") or [""]


class Job:
    """One that has been submitted.

    Attributes:
        number: Slurm's.
    """

    def __init__(self, cluster: SlurmCluster, number: str, folder: Path) -> None:
        self._cluster, self.number, self._folder = cluster, number, folder

    def output(self) -> str:
        """Return the output of all tasks."""
        return "".join(path.read_text() for path in sorted(self._folder.glob(f"slurm-{self.number}.*.txt")))

    def show(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        fields = self._cluster.ask("scontrol", "show", "job", "--oneliner", self.number).split()
        return next(word.partition("=")[2] for word in fields if word.startswith(f"{name}="))

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Until it has printed that."""

        def is_there() -> bool:
            if text in self.output():
                return True
            assert self.show("JobState") in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}, self.output()
            return False

        try:
            self._cluster.wait_for(is_there, timeout_s, repr(text))
        except AssertionError as err:
            raise AssertionError(f"{err}\n{self.output()}") from err

    def wait(self, timeout_s: float = 60.0) -> str:
        """Wait until the whole job has ended. Return its state."""
        words = ["squeue", "--noheader", f"--jobs={self.number}", "--states=all", "--format=%T"]
        states: set[str] = set()

        def has_ended() -> bool:
            states.clear()
            states.update(self._cluster.ask(*words).split())
            return not states & {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}

        try:
            self._cluster.wait_for(has_ended, timeout_s, f"end of job {self.number}")
        except AssertionError as err:
            raise AssertionError(f"{err}\n{self.output()}") from err
        return "+".join(sorted(states))


def _split(path: Path) -> list[str]:
    return [part for part in path.read_bytes().decode(errors="replace").split("\0") if part]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":  # a cluster to try things by hand, until a line comes
    with SlurmCluster() as _cluster:
        print(f"export SLURM_CONF={_cluster.environ['SLURM_CONF']} PATH={_PATH}", flush=True)
        sys.stdin.readline()
