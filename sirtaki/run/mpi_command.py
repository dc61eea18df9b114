"""The mpiexec command line of a job, in the words of the two families of mpiexec."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirtaki.mpi_library import Launcher, MpiLibrary

from .hosts import Host

# What other hosts need of this environment; ranks of this host inherit all of it.
_CARRIED_PREFIXES = (
    "SIRTAKI_", "HOROVOD_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "TORCH", "UCX_", "FI_", "PYTHON", "XDG_CACHE_",
    "MASTER_",
)  # fmt: skip
_SSH_VARIABLES = ("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args", "HYDRA_LAUNCHER_EXTRA_ARGS")

_CARRIED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HF_HOME", "TZ", "LANG")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be started.

    Attributes:
        ranks: how many.
        hosts: where, with slots; empty = here.
        command: what each rank runs.
        exported: names of variables that ranks on other hosts get too, with mpiexec's own values (which thus show
            in no list of processes).
        oversubscribed: more ranks than cores on a host; ranks that wait then give way.
        as_root: the launching user is root.
        binding: arguments that place and bind ranks, in mpiexec's words; empty = no binding.
        extra: further arguments for mpiexec, as they are.
        interfaces: network interfaces to use, empty = any.
        left_out: networks not to use, where no interfaces are named.
        tcp: only TCP between hosts.
        ssh: arguments for ssh, empty = none.
        silent_s: after which a host that says nothing counts as lost; None = as mpiexec has it.
    """

    ranks: int
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    exported: tuple[str, ...]
    oversubscribed: bool
    as_root: bool = False
    binding: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    tcp: bool = False
    ssh: tuple[str, ...] = ()
    silent_s: float | None = None

    @property
    def is_local(self) -> bool:
        """All ranks run on the launching machine."""
        return all(host.is_local for host in self.hosts)


def mpiexec_command(job: Job, mpiexec: Path, library: MpiLibrary) -> list[str]:
    """The command line; standard output and error come back marked with the rank of each line."""
    family = _open_mpi if library.launcher is Launcher.OPEN_MPI else _hydra
    return [str(mpiexec), *family(job, library), *job.extra, *job.command]


def ssh_variables(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """What mpiexec itself must find in its environment; each family reads its own variable.

    What the user has set there comes behind: of two values ssh takes the first.
    """
    own = shlex.join(job.ssh)
    return {name: " ".join(filter(None, [own, environ.get(name)])) for name in _SSH_VARIABLES if job.ssh}


def ssh_words(job: Job, environ: Mapping[str, str]) -> tuple[str, ...]:
    """With which ssh is to be called as mpiexec calls it."""
    given = next(filter(None, map(environ.get, _SSH_VARIABLES)), "")
    return (*job.ssh, *shlex.split(given))


def carried_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of those variables in `environ` that ranks on other hosts need."""
    return tuple(name for name in environ if name in _CARRIED or name.startswith(_CARRIED_PREFIXES))


def _open_mpi(job: Job, library: MpiLibrary) -> list[str]:
    has_prrte = library.version >= (5,)
    words = ["--allow-run-as-root"] if job.as_root else []
    words += ["-np", str(job.ranks)]
    if job.hosts:
        words += ["--host", _host_list(job.hosts)]
    # OVERSUBSCRIBE also where it is not needed: else mpiexec counts physical cores only and refuses.
    words += job.binding or ("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none")
    words += ["--output", "tag"] if has_prrte else ["--tag-output"]
    if job.oversubscribed:
        words += ["--mca", "mpi_yield_when_idle", "1"]
    if job.tcp:
        words += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp" if has_prrte else "self,vader,tcp"]
    # One-sided communication is used inside a host only; the UCX component complains about several windows.
    words += ["--mca", "osc", "^ucx"]
    runtime = "--prtemca" if has_prrte else "--mca"
    if job.hosts and job.silent_s is not None:
        # Its own values let a host that is gone be noticed after eight minutes.
        pause_s = max(1, round(job.silent_s / 6))
        for name, value in (("time", 2 * pause_s), ("intvl", pause_s), ("probes", 4)):
            words += [runtime, f"oob_tcp_keepalive_{name}", str(value)]
    if job.interfaces:
        names = ",".join(job.interfaces)
        words += ["--mca", "btl_tcp_if_include", names]
        words += [runtime, "prte_if_include" if has_prrte else "oob_tcp_if_include", names]
    elif job.left_out:
        words += ["--mca", "btl_tcp_if_exclude", ",".join(("127.0.0.0/8", *job.left_out))]
    for name in job.exported:
        words += ["-x", name]
    return words


def _hydra(job: Job, library: MpiLibrary) -> list[str]:
    del library  # Hydra's words have not changed over the versions
    words = ["-np", str(job.ranks), "-prepend-rank"]  # the environment travels whole, without being named
    if job.hosts:
        words += ["-hosts", _host_list(job.hosts)]
    words += job.binding
    if job.interfaces:
        words += ["-iface", job.interfaces[0]]
    if job.tcp:
        words += ["-genv", "FI_PROVIDER", "tcp", "-genv", "UCX_TLS", "tcp,sm,self"]
    return words


def _host_list(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)
