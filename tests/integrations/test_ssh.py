"""Jobs over hosts that are logged in to by a real ssh, from the first login to the last process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from integrations import ssh_training
from integrations.ssh_hosts import OTHER_PORT, OTHER_USER, SILENT, UNKNOWN, SshHosts, why_unavailable

from bench.lib.cluster import LabError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_unavailable() is not None, reason=f"no hosts with sshd: {why_unavailable()}"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(ssh_training.__file__)
PYTHON = Path(sys.executable)
STATIC: tuple[str, ...] = ()
ELASTIC = ("-np", "3", "--min-np", "2")
SOON_S = 20.0
"""Time limit for the error of a job that cannot start. ssh itself waits 10 s for a silent host."""

both = pytest.mark.parametrize("options", [STATIC, ELASTIC], ids=["static", "elastic"])
slowly = pytest.param(ELASTIC, id="elastic", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def built() -> Iterator[SshHosts]:
    with TemporaryDirectory(prefix="ssh-") as folder, ExitStack() as stack:
        try:
            hosts = stack.enter_context(SshHosts(Path(folder)))
        except (LabError, OSError, subprocess.SubprocessError) as err:
            pytest.skip(f"no hosts with sshd: {err}")
        yield hosts


class Jobs:
    """Starts jobs on the hosts, and looks at what they leave."""

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.seconds = float("nan")
        self._process: subprocess.Popen[str] | None = None

    def start(self, *options: object, names: Sequence[str] = (), steps: int = 12, pause_s: float = 0.0) -> None:
        listed = ",".join(f"{name}:1" for name in names or self.hosts.names)
        words = [PYTHON.with_name("sirtakirun"), "-H", listed, *options]
        command = [PYTHON, SCRIPT, self.folder, steps, pause_s]
        with (self.folder / "out").open("w") as out:
            self._process = self.hosts.start(
                list(map(str, [*words, *command])), stdout=out, stderr=subprocess.STDOUT, pid_file=self.folder / "pid"
            )
        self._begin_s = time.monotonic()

    def wait(self, timeout_s: float = 200.0) -> int:
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job does not end\n{self.said}")
        finally:
            self.seconds = time.monotonic() - self._begin_s

    def run(self, *options: object, **more: object) -> int:
        self.start(*options, **more)  # type: ignore[arg-type]
        return self.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.hosts.on(0, f"kill -{signal.SIGTERM.value} $(cat {self.folder}/pid)", check=False)
            self._process.wait(30.0)

    @property
    def said(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def ends(self) -> dict[str, dict[str, object]]:
        """Return the results of ranks that have ended, by host."""
        return {path.suffix[1:]: json.loads(path.read_text()) for path in self.folder.glob("end.*")}

    def step(self, host: int) -> int:
        """At which that host's rank is."""
        path = self.folder / f"at.{self.hosts.names[host]}"
        return int(path.read_text() or -1) if path.exists() else -1

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                pytest.fail(f"it does not come true: {self.hosts.processes()}\n{self.said}")
            time.sleep(0.1)

    def check_trained(self, hosts: int = 3) -> None:
        """Check that these hosts' ranks ended with the result of one process."""
        assert len(self.ends) == hosts, self.said
        for end in self.ends.values():
            assert end["total"] == pytest.approx(ssh_training.in_one_process(end["sizes"]), abs=1e-9)  # type: ignore[arg-type]

    def nothing_is_left(self, within_s: float = 5.0) -> None:
        self.until(lambda: not self.hosts.processes(), within_s)
        assert self.hosts.leftovers() == []


@pytest.fixture
def jobs(built: SshHosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [name for name in os.environ if name.startswith(("SIRTAKI_", "HOROVOD_", "SLURM_"))]:
        monkeypatch.delenv(name)
    with TemporaryDirectory(prefix="job-") as folder:
        monkeypatch.chdir(folder)
        jobs = Jobs(built, Path(folder))
        yield jobs
        jobs.stop()
        monkeypatch.chdir("/")
    built.restore()


def sentence(jobs: Jobs) -> str:
    """Return the only output line of a job that could not start. No process may have been started."""
    assert jobs.seconds < SOON_S, jobs.said
    assert jobs.ends == {}
    lines = [line for line in jobs.said.splitlines() if "ranks to start, but the remaining hosts" not in line]
    assert len(lines) == 1, jobs.said
    jobs.nothing_is_left(within_s=8.0)
    return lines[0]


@both
def test_three_hosts_train_as_one_process_and_keep_nothing(jobs: Jobs, options: Sequence[str]) -> None:
    assert jobs.run(*options, "-x", "DATA=for all") == 0, jobs.said
    jobs.check_trained()
    assert {end["data"] for end in jobs.ends.values()} == {"for all"}
    jobs.nothing_is_left()


@pytest.mark.parametrize("options", [STATIC, slowly], ids=["static", "elastic"])
@pytest.mark.parametrize(
    "by_config",
    [pytest.param(False, id="options"), pytest.param(True, id="config", marks=pytest.mark.slow)],
)
def test_another_port_key_and_user(jobs: Jobs, options: Sequence[str], by_config: bool) -> None:
    hosts = jobs.hosts
    for host in (1, 2):
        hosts.serve(host, port=OTHER_PORT, keys="other_keys")
    hosts.know(0, range(3), port=OTHER_PORT)
    told: tuple[object, ...] = ("--ssh-port", OTHER_PORT, "--ssh-identity-file", hosts.other_key)
    if by_config:
        told = ()
        text = f"Host sirtaki-n*\n Port {OTHER_PORT}\n User {OTHER_USER}\n IdentityFile {hosts.other_key}\n"
        (hosts.home(0) / ".ssh" / "config").write_text(text)
    assert jobs.run(*options, *told) == 0, jobs.said
    jobs.check_trained()
    assert {jobs.ends[name]["user"] for name in hosts.names[1:]} == {OTHER_USER if by_config else "root"}
    jobs.nothing_is_left()


def _refuses(hosts: SshHosts) -> None:
    hosts.refuse(1)


def _wants_another_key(hosts: SshHosts) -> None:
    hosts.serve(1, keys="other_keys")


def _is_a_stranger(hosts: SshHosts) -> None:
    hosts.know(0, [0, 2])


@pytest.mark.parametrize("options", [STATIC, slowly], ids=["static", "elastic"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (_refuses, r"Connection refused: start sshd there, or set its port with --ssh-port"),
        (_wants_another_key, r"Permission denied .*: install your key there, `ssh-copy-id sirtaki-n1`"),
        (_is_a_stranger, r"Host key verification failed: log in once manually, `ssh sirtaki-n1`"),
    ],
)
def test_a_host_that_refuses_logins(
    jobs: Jobs, options: Sequence[str], fault: Callable[[SshHosts], None], says: str
) -> None:
    fault(jobs.hosts)
    assert jobs.run(*options) == 1
    assert re.search(rf"sirtakirun: host sirtaki-n1 .*{says}", sentence(jobs)), jobs.said


@both
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (UNKNOWN, "Could not resolve hostname .*: check the name"),
        pytest.param(SILENT, "timed out: check that it is running and that no firewall", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_does_not_exist(jobs: Jobs, options: Sequence[str], name: str, says: str) -> None:
    assert jobs.run(*options, names=[jobs.hosts.names[0], name, jobs.hosts.names[2]]) == 1
    assert re.search(rf"sirtakirun: host {name} .*{says}", sentence(jobs)), jobs.said


def _no_python(stack: ExitStack, hosts: SshHosts, folder: Path) -> None:
    stack.enter_context(hosts.replaced(1, PYTHON.parent, _empty(folder)))


def _no_sirtaki(stack: ExitStack, hosts: SshHosts, folder: Path) -> None:
    stack.enter_context(hosts.replaced(1, ROOT / "sirtaki", _empty(folder)))


def _other_sirtaki(stack: ExitStack, hosts: SshHosts, folder: Path) -> None:
    module, other = ROOT / "sirtaki" / "__init__.py", folder / "other.py"
    other.write_text(re.sub(r'(__version__ = ")[^"]*', r"\g<1>0.0.9", module.read_text()))
    stack.enter_context(hosts.replaced(1, module, other))


def _other_torch(stack: ExitStack, hosts: SshHosts, folder: Path) -> None:
    from importlib.metadata import distribution

    metadata, other = Path(str(distribution("torch").locate_file(""))), folder / "METADATA"
    (metadata,) = metadata.glob("torch-*.dist-info/METADATA")
    other.write_text(re.sub(r"(?m)^Version: .*", "Version: 2.0.1", metadata.read_text(), count=1))
    stack.enter_context(hosts.replaced(1, metadata, other))


def _no_script(stack: ExitStack, hosts: SshHosts, folder: Path) -> None:
    stack.enter_context(hosts.replaced(1, SCRIPT.parent, _empty(folder)))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.parametrize("options", [STATIC, slowly], ids=["static", "elastic"])
@pytest.mark.parametrize(
    ("lack", "says"),
    [
        (_no_python, "No such file or directory: install the same Python environment there"),
        (_no_sirtaki, r"No module named .*: install the same version of Sirtaki there for \S+"),
        (_other_sirtaki, r"it has Sirtaki 0\.0\.9, but the launcher has \S+: install the same"),
        (_other_torch, r"it has PyTorch 2\.0\.1, but the launcher has \S+: install the same"),
        (_no_script, r"there is no script \S+/ssh_training.py: copy it there, or use a shared file system"),
    ],
)
def test_a_host_that_lacks_something(
    jobs: Jobs, tmp_path: Path, options: Sequence[str], lack: Callable[[ExitStack, SshHosts, Path], None], says: str
) -> None:
    with ExitStack() as stack:
        lack(stack, jobs.hosts, tmp_path)
        assert jobs.run(*options) == 1
    assert re.search(rf"sirtakirun: host sirtaki-n1 .*{says}", sentence(jobs)), jobs.said


def test_a_static_job_ends_by_name_when_a_host_vanishes(jobs: Jobs) -> None:
    jobs.start("-x", "SIRTAKI_HEARTBEAT_S=6", steps=100_000, pause_s=0.05)
    jobs.until(lambda: jobs.step(2) > 3)
    jobs.hosts.cut(2)
    begin_s = time.monotonic()
    assert jobs.wait() == 1
    assert time.monotonic() - begin_s < 6.0 + 12.0
    assert "rank 2 on sirtaki-n2 failed (its host cannot be reached any more)" in jobs.said
    jobs.hosts.join(2)
    jobs.nothing_is_left(within_s=30.0)


@pytest.mark.slow
def test_an_elastic_job_continues_when_a_host_vanishes(jobs: Jobs) -> None:
    jobs.start(*ELASTIC, "--blacklist-cooldown-range", 600, 600, steps=150, pause_s=0.1)
    jobs.until(lambda: jobs.step(2) > 3)
    jobs.hosts.cut(2)
    assert jobs.wait() == 0
    assert "host sirtaki-n2 is lost (it has been silent for 10 s) with rank 2" in jobs.said
    jobs.check_trained(hosts=2)
    sizes = jobs.ends[jobs.hosts.names[0]]["sizes"]
    assert (sizes[0], sizes[-1]) == (3, 2)  # type: ignore[index]
    jobs.hosts.join(2)
    jobs.nothing_is_left(within_s=90.0)


@pytest.mark.parametrize("options", [STATIC, slowly], ids=["static", "elastic"])
def test_a_bridge_with_one_address_on_all_hosts_is_not_used(jobs: Jobs, options: Sequence[str]) -> None:
    for host in range(3):
        jobs.hosts.add_network(host, "docker0", "172.17.0.1/16")
    assert jobs.run(*options) == 0, jobs.said
    jobs.check_trained()


@pytest.mark.slow
@both
def test_the_network_that_joins_the_hosts_is_named(jobs: Jobs, options: Sequence[str]) -> None:
    for host in range(3):
        jobs.hosts.add_network(host, "aaa0", f"192.168.7.{host + 1}/24")
    assert jobs.run(*options, "--network-interfaces", "eth0") == 0, jobs.said
    jobs.check_trained()


@both
def test_a_missing_interface_is_rejected_with_the_existing_ones(jobs: Jobs, options: Sequence[str]) -> None:
    assert jobs.run(*options, "--network-interfaces", "eth7") == 2
    assert re.search(r"interface eth7 .*lo \(127\.0\.0\.1\), eth0 \(10\.77\.0\.1\)", sentence(jobs)), jobs.said
