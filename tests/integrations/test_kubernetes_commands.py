"""The commands of deploy/kubernetes train, with pods that are processes of this machine, and go on after a kill.

Each pod gets the variables that Kubernetes or an operator would give it; names of pods become loopback, and the
volume a folder.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from integrations.launching import EXAMPLES, PROGRAMS
from integrations.manifests import pod_templates, rendered, training

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SCRIPT = [str(Path(__file__).parent / "slowed.py"), str(EXAMPLES / "elastic_digits.py")]
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PODS = 2
END_S = 200.0


def values(ranks_per_pod: int) -> dict[str, Any]:
    found = training()
    found["spec"] |= {"script": SCRIPT, "pods": PODS, "podsButFirst": PODS - 1, "ranksPerPod": ranks_per_pod}
    return found


@pytest.fixture
def port(reserve: Callable[..., int]) -> str:
    """Port at which ranks meet, at all addresses of this host."""
    return str(reserve(host=""))


def own_environ(entries: list[dict[str, Any]], index: int, volume: Path) -> dict[str, str]:
    """Return a container's `env` as the kubelet resolves it, without the optional secret."""
    found = {}
    for entry in entries:
        if "value" in entry:
            found[entry["name"]] = entry["value"].replace("/volume", str(volume))
        elif "fieldRef" in entry["valueFrom"]:
            assert entry["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
            found[entry["name"]] = str(index)
        else:
            assert entry["valueFrom"]["secretKeyRef"]["optional"]
    return found


def start_pod(words: list[str], environ: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start a container with the image's PATH and working folder, and its own variables."""
    inherited = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "LD_LIBRARY_PATH") if name in os.environ}
    with output.open("ab") as file:
        return subprocess.Popen(
            words,
            cwd=output.parent,
            env={
                **inherited,
                "PATH": os.pathsep.join((str(PROGRAMS), os.environ["PATH"])),
                "PYTHONPATH": str(EXAMPLES.parent),
                "PYTHONUNBUFFERED": "1",
                "SIRTAKI_CHECKPOINT_S": "0.2",
                "SIRTAKI_WARMUP_ITERATIONS": "26",
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                **environ,
            },
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def kill_pod(pod: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a container at once."""
    for process in [pod.pid, *descendants(pod.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    pod.wait()


def descendants(process: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()):
            yield child
            yield from descendants(child)


def run_until_killed_then_to_the_end(
    pods: list[tuple[list[str], dict[str, str]]], folder: Path, *, killed: int
) -> tuple[str, str]:
    """Return the output until a pod is killed after its second epoch, and the output after a restart of all pods."""
    said = []
    for attempt in ("first", "second"):
        outputs = [folder / f"{attempt}-{index}.txt" for index in range(len(pods))]
        running = [start_pod(*pod, output) for pod, output in zip(pods, outputs, strict=True)]
        try:
            end = time.monotonic() + END_S
            if attempt == "first":
                while "epoch 2:" not in "".join(output.read_text() for output in outputs):
                    assert time.monotonic() < end, [output.read_text() for output in outputs]
                    assert all(pod.poll() is None for pod in running), [output.read_text() for output in outputs]
                    time.sleep(0.02)
                kill_pod(running[killed])
            codes = [pod.wait(end - time.monotonic()) for pod in running]
        finally:
            for pod in running:
                kill_pod(pod)
        text = "".join(output.read_text() for output in outputs)
        # Kubernetes starts a pod again that has failed: all have to, or they would be missed.
        assert all(codes) if attempt == "first" else not any(codes), text
        said.append(text)
    return said[0], said[1]


def epochs(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"epoch (\d+): loss", text)]


def assert_went_on(first: str, second: str) -> None:
    assert epochs(first)[:2] == [1, 2]
    assert 1 not in epochs(second), second
    assert epochs(second)[-1] == 6
    accuracy = re.search(r"accuracy: ([\d.]+) %", second)
    assert accuracy is not None, second
    assert float(accuracy[1]) > 85


@pytest.mark.parametrize("killed", [0, 1])
def test_an_indexed_job(tmp_path: Path, port: str, killed: int) -> None:
    job = rendered("job", values(1))[-1]
    (template,) = pod_templates(job)
    (train,) = template["spec"]["containers"]
    pods = []
    for index in range(job["spec"]["completions"]):
        environ = own_environ(train["env"], index, tmp_path)
        assert environ["PET_MASTER_ADDR"] == "digits-0.digits"
        environ |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "JOB_COMPLETION_INDEX": str(index)}
        pods.append((train["command"] + train["args"], environ))
    assert_went_on(*run_until_killed_then_to_the_end(pods, tmp_path, killed=killed))
    assert (tmp_path / "registry.sqlite").exists()


def test_a_pytorchjob_with_two_ranks_in_a_pod(tmp_path: Path, port: str) -> None:
    (job,) = rendered("pytorchjob", values(2))
    replicas, pods = job["spec"]["pytorchReplicaSpecs"], []
    for rank, role in enumerate(["Master", *["Worker"] * replicas["Worker"]["replicas"]]):
        (train,) = replicas[role]["template"]["spec"]["containers"]
        # The operator tells the master "localhost" and the workers its name.
        host = "localhost" if role == "Master" else socket.gethostbyname(socket.gethostname())
        given = {"MASTER_ADDR": host, "MASTER_PORT": port, "PET_MASTER_ADDR": host, "PET_MASTER_PORT": port}
        given |= {"WORLD_SIZE": str(2 * PODS), "RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NNODES": str(PODS)}
        given |= {"PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"], "PYTHONUNBUFFERED": "0"}
        pods.append((train["command"] + train["args"], own_environ(train["env"], rank, tmp_path) | given))
    assert_went_on(*run_until_killed_then_to_the_end(pods, tmp_path, killed=1))


def test_a_trainjob(tmp_path: Path, port: str) -> None:
    (job,) = rendered("trainjob", values(1))
    trainer, pods = job["spec"]["trainer"], []
    for index in range(trainer["numNodes"]):
        given = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NODE_RANK": str(index)}
        given |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        pods.append((trainer["command"] + trainer["args"], own_environ(trainer["env"], index, tmp_path) | given))
    assert_went_on(*run_until_killed_then_to_the_end(pods, tmp_path, killed=1))


def test_an_mpijobs_launcher(tmp_path: Path) -> None:
    (job,) = rendered("mpijob", values(1))
    (launcher,) = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    hostfile = tmp_path / "hostfile"
    workers = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    hostfile.write_text(f"localhost slots={job['spec']['slotsPerWorker']}\n" * workers)
    given = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": str(job["spec"]["slotsPerWorker"]),
    }
    words = [word.replace("/etc/mpi/hostfile", str(hostfile)) for word in launcher["command"] + launcher["args"]]
    environ = own_environ(launcher["env"], 0, tmp_path) | given
    assert_went_on(*run_until_killed_then_to_the_end([(words, environ)], tmp_path, killed=0))
