from pathlib import Path

import pytest

from sirtaki.mpi_library import MpiLibrary
from sirtaki.run.hosts import Host
from sirtaki.run.rank_command import Job, carried_variables, mpiexec_command, ssh_variables, ssh_words

MPIEXEC = Path("/opt/mpi/bin/mpiexec")


def library(vendor, *version):
    return MpiLibrary(vendor=vendor, version=version, library=None, mpi4py="4.1.0", horovod=None)


def line(vendor, *version, **changes):
    plain = {"ranks": 2, "hosts": (), "command": ("python", "x.py"), "exported": (), "oversubscribed": False}
    return " ".join(mpiexec_command(Job(**{**plain, **changes}), MPIEXEC, library(vendor, *version)))


def test_a_plain_job_under_each_mpiexec():
    five = line("Open MPI", 5, 0, 11)
    assert five.startswith("/opt/mpi/bin/mpiexec -np 2 --map-by slot:OVERSUBSCRIBE --bind-to none --output tag ")
    assert five.endswith(" python x.py")
    assert "--tag-output" in line("Open MPI", 4, 1, 6)
    assert line("MPICH", 5, 0, 2) == "/opt/mpi/bin/mpiexec -np 2 -prepend-rank python x.py"


def test_root_and_oversubscription_are_told_to_open_mpi_only():
    assert "--allow-run-as-root" in line("Open MPI", 5, 0, 11, as_root=True)
    assert "--mca mpi_yield_when_idle 1" in line("Open MPI", 5, 0, 11, oversubscribed=True)
    assert "root" not in line("MPICH", 5, 0, 2, as_root=True, oversubscribed=True)


def test_hosts_network_and_binding_in_the_words_of_each():
    changes = {
        "hosts": (Host(name="a", slots=2), Host(name="b", slots=1)),
        "interfaces": ("eth0", "eth1"),
        "tcp": True,
        "binding": ("--bind-to", "core"),
        "extra": ("--quiet",),
        "exported": ("FOO",),
    }
    open_mpi = line("Open MPI", 5, 0, 11, **changes)
    for part in (
        "--host a:2,b:1", "--mca btl_tcp_if_include eth0,eth1", "--prtemca prte_if_include eth0,eth1",
        "--mca btl self,sm,tcp", "--bind-to core", "-x FOO", "--quiet python",
    ):  # fmt: skip
        assert part in open_mpi
    assert "--bind-to none" not in open_mpi
    assert "oob_tcp_if_include eth0,eth1" in line("Open MPI", 4, 1, 6, **changes)
    hydra = line("Intel MPI", 2021, 9, **changes)
    for part in ("-hosts a:2,b:1", "-iface eth0", "-genv FI_PROVIDER tcp", "--bind-to core", "--quiet python"):
        assert part in hydra


def test_ssh_options_reach_whatever_mpiexec_it_is():
    job = Job(ranks=1, hosts=(), command=(), exported=(), oversubscribed=False, ssh=("-p", "22", "-i", "my key"))
    assert set(ssh_variables(job, {}).values()) == {"-p 22 -i 'my key'"}
    assert len(ssh_variables(job, {})) == 3
    assert ssh_variables(job, {"PRTE_MCA_plm_ssh_args": "-C"})["PRTE_MCA_plm_ssh_args"] == "-p 22 -i 'my key' -C"
    assert ssh_words(job, {"OMPI_MCA_plm_rsh_args": "-o A=1"}) == ("-p", "22", "-i", "my key", "-o", "A=1")


def test_a_silent_host_is_noticed_within_the_heartbeat_and_networks_that_join_nobody_are_left_out():
    changes = {"hosts": (Host(name="a", slots=2), Host(name="b", slots=1)), "left_out": ("172.17.0.0/16",)}
    words = line("Open MPI", 5, 0, 11, silent_s=30.0, **changes)
    for part in (
        "--prtemca oob_tcp_keepalive_time 10", "--prtemca oob_tcp_keepalive_intvl 5",
        "--prtemca oob_tcp_keepalive_probes 4", "--mca btl_tcp_if_exclude 127.0.0.0/8,172.17.0.0/16",
    ):  # fmt: skip
        assert part in words
    assert "keepalive" not in line("Open MPI", 5, 0, 11, silent_s=None, **changes)
    assert "keepalive" not in line("Open MPI", 5, 0, 11, silent_s=30.0)
    assert "exclude" not in line("Open MPI", 5, 0, 11, interfaces=("eth0",), **changes)


@pytest.mark.parametrize("name", ["SIRTAKI_STREAMS", "HOROVOD_TIMELINE", "NCCL_DEBUG", "PATH", "PYTHONPATH"])
def test_what_ranks_elsewhere_need_is_carried_and_the_rest_is_not(name):
    assert carried_variables({name: "x", "AWS_SECRET_ACCESS_KEY": "x", "DISPLAY": ":0"}) == (name,)
