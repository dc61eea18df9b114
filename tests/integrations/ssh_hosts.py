"""Hosts on one machine with an sshd each: network namespaces of `bench.lib.cluster`, host keys, accounts, homes.

Each host has its own home and TMPDIR, and further files by `hide` and `replace`. Leaving the `with` removes everything.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.lib.cluster import CUT, WHOLE, LabError, LabShape, NetLab
from bench.lib.cluster import why_unavailable as no_cluster

HOSTS = 3
OTHER_PORT = 2222
SILENT = "sirtaki-silent"
"""A host whose address does not answer."""

UNKNOWN = "sirtaki-nowhere"
"""A name that no resolver knows."""

OTHER_USER = "dancer"
"""An account beside root on each host."""

SSHD = "/usr/sbin/sshd"
_READY_S = 10.0
_KEPT = ("torchinductor_", "sirtaki-")  # PyTorch makes one wherever it is loaded; where `sirtaki top` looks


def why_unavailable() -> str | None:
    """Why there are no such hosts on this machine, or None."""
    if not Path(SSHD).exists() or not shutil.which("ssh-keygen"):
        return "there is no sshd (package openssh-server)"
    return no_cluster()


class SshHosts:
    """Three hosts, of which the first is where jobs are started."""

    def __init__(self, folder: Path) -> None:
        """Prepare the hosts. Entering raises LabError if this machine does not permit them.

        `folder` is empty, and its path short.
        """
        self._folder = folder
        self.lab = NetLab(LabShape(nodes=HOSTS, link_bits_per_s=1_000_000_000, flow_bits_per_s=1_000_000_000))
        self._sshd: list[subprocess.Popen[str] | None] = [None] * HOSTS
        self._added: list[tuple[int, str]] = []
        self._cut: set[int] = set()
        self._changed: set[int] = set()

    def __enter__(self) -> SshHosts:
        try:
            self.lab.__enter__()
            self._make_keys()
            for host in range(HOSTS):
                self._furnish(host)
                self.serve(host)
            self._fix_neighbours()
            self.on(0, f"ssh -o BatchMode=yes -o ConnectTimeout=5 {self.names[1]} true")
        except BaseException:
            self.lab.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()
        for process in filter(None, self._sshd):
            process.wait(_READY_S)

    @property
    def names(self) -> list[str]:
        """Return the host names as jobs use them."""
        return [self.lab.hostname(host) for host in range(HOSTS)]

    def home(self, host: int) -> Path:
        """Return the home of root on a host; the other user's home is `other` in it."""
        return self._folder / f"home{host}"

    def on(self, host: int, script: str, *, check: bool = True) -> str:
        """Run a shell script on a host, without ssh. Return its output."""
        process = self.lab.popen(
            host, ["sh", "-euc", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        out, _ = process.communicate(timeout=60)
        if check and process.returncode:
            raise LabError(f"{script}: {out}")
        return str(out)

    @property
    def other_key(self) -> Path:
        """Return the public key of the other user."""
        return self._folder / "other_id"

    def start(self, words: Sequence[str], *, pid_file: Path, **options: object) -> subprocess.Popen[str]:
        """Start a program on the first host, as root after a login. Its process id is written to a file."""
        environ = {name: "" for name in os.environ if name.startswith(("SSH_", "DISPLAY"))}
        environ |= {"HOME": str(self.home(0)), "OMP_NUM_THREADS": "1", "SIRTAKI_REGISTRY": "off"}
        command = ["sh", "-c", f'echo $$ > {pid_file}; exec "$@"', "sh", *words]
        return self.lab.popen(0, command, env=environ, stdin=subprocess.DEVNULL, **options)

    def serve(self, host: int, *, port: int = 22, keys: str = "authorized_keys") -> None:
        """Restart the sshd of a host.

        Args:
            host: number of the host.
            port: port of sshd.
            keys: file in `.ssh` of homes with the keys that may log in.
        """
        self.refuse(host)
        config = self._folder / f"sshd{host}"
        config.write_text(
            f"Port {port}\nListenAddress 0.0.0.0\nHostKey {self._folder}/host{host}\nPidFile none\nUsePAM no\n"
            f"StrictModes no\nPermitRootLogin yes\nPasswordAuthentication yes\nAuthorizedKeysFile .ssh/{keys}\n"
            f"MaxStartups 100\nSetEnv TMPDIR={self._folder}/tmp{host}\nLogLevel ERROR\n"
        )
        self._sshd[host] = self.lab.popen(
            host, [SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + _READY_S
        while str(port) not in self.on(host, f"ss -Hltn 'sport = :{port}'"):
            if time.monotonic() > deadline_s:
                raise LabError(
                    f"sshd of host {host} does not listen: {self.on(host, f'{SSHD} -t -f {config} || true')}"
                )
            time.sleep(0.05)

    def refuse(self, host: int) -> None:
        """Stop the sshd of a host."""
        self._changed.add(host)
        if (process := self._sshd[host]) is not None:
            process.terminate()
            process.wait(_READY_S)
            self._sshd[host] = None

    def cut(self, host: int) -> None:
        """Drop all packets from and to a host, without notice."""
        self.lab.hurt(host, into=CUT, out_of=CUT)
        self._cut.add(host)

    def join(self, host: int) -> None:
        """Undoes `cut`."""
        self.lab.hurt(host, into=WHOLE, out_of=WHOLE)
        self._cut.discard(host)

    @contextlib.contextmanager
    def replaced(self, host: int, path: Path, other: Path) -> Iterator[None]:
        """Replace a file or folder on a host by another one."""
        self.on(host, f"mount --bind {shlex.quote(str(other))} {shlex.quote(str(path))}")
        try:
            yield
        finally:
            self.on(host, f"umount --lazy {shlex.quote(str(path))}")

    def add_network(self, host: int, name: str, address: str) -> None:
        """Add an interface that reaches no other host."""
        self.on(host, f"ip link add {name} type bridge; ip address add {address} dev {name}; ip link set {name} up")
        self._added.append((host, name))

    def restore(self) -> None:
        """Undoes what a test has done to logins, links and networks."""
        for host, name in self._added:
            self.on(host, f"ip link delete {name}")
        self._added.clear()
        for host in self._cut.copy():
            self.join(host)
        (self.home(0) / ".ssh" / "config").unlink(missing_ok=True)
        self.know(0, range(HOSTS))
        for host in self._changed.copy():
            self.serve(host)
            self._changed.discard(host)
        for host in range(HOSTS):
            for path in (self._folder / f"tmp{host}").iterdir():
                shutil.rmtree(path, ignore_errors=True)

    def processes(self) -> dict[int, list[str]]:
        """By host the command lines of what runs there besides sshd's listener and the namespaces' own process."""
        spaces = {self.on(host, "readlink /proc/self/ns/net").strip(): host for host in range(HOSTS)}
        found: dict[int, list[str]] = {host: [] for host in range(HOSTS)}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                host = spaces.get(os.readlink(folder / "ns" / "net"))
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if (
                    host is not None
                    and words
                    and not words.startswith(("sleep infinity", "sshd: /usr/sbin/sshd", SSHD))
                ):
                    found[host].append(words)
        return {host: lines for host, lines in found.items() if lines}

    def leftovers(self) -> list[str]:
        """Return files that jobs have left in TMPDIR of any host and in /dev/shm."""
        folders = [self._folder / f"tmp{host}" for host in range(HOSTS)]
        found = [str(path) for folder in folders for path in folder.iterdir() if not path.name.startswith(_KEPT)]
        shared = [name for host in range(HOSTS) for name in self.on(host, "ls /dev/shm").split()]
        return [*found, *shared]

    def _make_keys(self) -> None:
        names = [*(f"host{host}" for host in range(HOSTS)), "id", "other_id"]
        for name in names:
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self._folder / name)]
            subprocess.run(words, check=True)

    def _furnish(self, host: int) -> None:
        """Homes, accounts and folders of that host."""
        folder, home = self._folder, self.home(host)
        for path in (home / ".ssh", home / "other" / ".ssh", folder / f"tmp{host}"):
            path.mkdir(parents=True, mode=0o700)
        keys = {name: (folder / f"{name}.pub").read_text() for name in ("id", "other_id")}
        for user in (home, home / "other"):
            (user / ".ssh" / "authorized_keys").write_text(keys["id"])
            (user / ".ssh" / "other_keys").write_text(keys["other_id"])
        shutil.copy(folder / "id", home / ".ssh" / "id_ed25519")
        self.know(host, range(HOSTS))
        accounts = [line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[2] != "0"]
        shell = "/bin/sh"
        accounts = [
            f"root:x:0:0:root:{home}:{shell}",
            f"{OTHER_USER}:x:0:0::{home}/other:{shell}",
            *accounts,
        ]
        (folder / f"passwd{host}").write_text("\n".join(accounts) + "\n")
        hosts = (Path(str(self.lab.agent)).parent / "hosts").read_text()
        (folder / "hosts").write_text(f"{hosts}10.77.0.99 {SILENT}\n")
        self.on(
            host,
            f"mount --bind {folder}/passwd{host} /etc/passwd; mount --bind {folder}/hosts /etc/hosts\n"
            "mount -t tmpfs tmpfs /run; mkdir -m 755 /run/sshd",
        )

    def know(self, host: int, known: Sequence[int], *, port: int = 22) -> None:
        """Which host keys that host's root knows."""
        lines = []
        for other in known:
            key = " ".join((self._folder / f"host{other}.pub").read_text().split()[:2])
            name = self.lab.hostname(other)
            lines.append(f"{name if port == 22 else f'[{name}]:{port}'} {key}\n")
        (self.home(host) / ".ssh" / "known_hosts").write_text("".join(lines))

    def _fix_neighbours(self) -> None:
        """Keep neighbour entries of lost hosts, because a routed network would not report their loss."""
        links = [self.on(host, "ip -o link show eth0").partition("link/ether ")[2].split()[0] for host in range(HOSTS)]
        links.append("02:00:00:00:00:99")
        addresses = [*(self.lab.address(host) for host in range(HOSTS)), "10.77.0.99"]
        for host in range(HOSTS):
            for address, link in zip(addresses, links, strict=True):
                if address != self.lab.address(host):
                    self.on(host, f"ip neighbour replace {address} lladdr {link} dev eth0 nud permanent")
