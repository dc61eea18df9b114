"""The launcher of this process, derived from the environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.engine.launchers import (
    LauncherRank,
    check_world_size,
    node_names,
    place,
    step_place,
    task_counts,
    torch_place,
)
from sirtaki.errors import ConfigError

# ── launchers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


SBATCH = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}


SRUN = {
    **SBATCH, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "size", "says"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            1,
            "WORLD_SIZE=2,.*torchrun.*SIRTAKI_CONTROL=mpi.*sirtakirun -np 2",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            1,
            "started 4 ranks .OMPI_COMM_WORLD_SIZE., .*sirtakirun -np 4",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 2, "MPI_COMM_WORLD has size 2"),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, 1, "started 3 ranks .PMI_SIZE., "),
        (SRUN, 1, "srun started 8 tasks.*SIRTAKI_CONTROL=mesh.*--mpi=pmix"),
        ({**SRUN, "PMI_SIZE": "8"}, 1, "started 8 ranks .PMI_SIZE.,.*SIRTAKI_CONTROL=mesh.*--mpi=pmix"),
        ({**SRUN, "PMIX_RANK": "3"}, 1, "srun started 8 tasks"),
    ],
)
def test_a_launcher_that_meant_more_ranks_than_mpi_sees_is_refused_with_the_remedy(environ, size, says):
    with pytest.raises(ConfigError, match=says):
        check_world_size(size, environ)


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 1),
        (SBATCH, 1),  # a batch script, or a shell of salloc's: no task of srun's
        ({**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, 1),  # salloc's interactive step
        ({**SRUN, "PMIX_RANK": "0"}, 8),
        ({**SRUN, "OMPI_COMM_WORLD_SIZE": "1"}, 1),  # below mpiexec's daemons
        ({**SRUN, "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"WORLD_SIZE": "2"}, 1),  # somebody's setting: no rank goes with it
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "1"}, 1),  # mpiexec -np 1 said it later
        ({"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMI_SIZE": "?"}, 1),
    ],
)
def test_a_world_of_the_launchers_size_is_accepted(environ, size):
    check_world_size(size, environ)


def test_a_rank_reads_its_place_from_whichever_launcher_it_was():
    assert place("RANK", {"PMI_RANK": "3"}) == 3
    assert place("SIZE", {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "9"}) == 4
    assert place("LOCAL_RANK", {}) is None
    assert [place(name, SRUN) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")] == [5, 8, 1, 4]
    assert place("RANK", SBATCH) is None  # of the batch script, whoever it starts


TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_torchruns_variables_are_a_place():
    assert torch_place({}) is None
    assert torch_place({"WORLD_SIZE": "4"}) is None  # somebody's setting: no rank goes with it
    expected = LauncherRank(rank=1, size=4, host="node0", port=29500, agent_store=False, attempt="none/0")
    assert torch_place(TORCH) == expected
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = torch_place(TORCH | elastic)
    assert place is not None
    assert (place.agent_store, place.attempt) == (True, "x/2")
    alone = torch_place({"RANK": "0", "WORLD_SIZE": "1"})
    assert alone is not None
    assert (alone.size, alone.port) == (1, 0)


def test_tasks_of_srun_meet_at_its_first_node_by_default():
    place = torch_place(SRUN)
    assert place is not None
    assert (place.rank, place.size, place.host, place.attempt) == (5, 8, "node1", "slurm/7.0/0")
    assert place.port < 32768
    again, other = torch_place(SRUN | {"SLURM_RESTART_COUNT": "1"}), torch_place(SRUN | {"SLURM_JOB_ID": "8"})
    assert again is not None
    assert other is not None
    assert again.attempt != place.attempt
    assert other.port != place.port
    told = torch_place(SRUN | {"MASTER_ADDR": "ib1", "MASTER_PORT": "29500"})
    assert told is not None
    assert (told.host, told.port) == ("ib1", 29500)
    assert torch_place(SRUN | TORCH) == torch_place(TORCH)
    assert torch_place(SBATCH) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": "4"}, "RANK: expected less than WORLD_SIZE=4, found 4"),
        ({"RANK": "one"}, "RANK: expected an integer of at least 0, found 'one'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: expected an integer of at least 1, found '0'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: .* found 'http'"),
        ({"MASTER_ADDR": ""}, r"missing: MASTER_ADDR\. .*torchrun or sirtakirun.*unset RANK"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "missing: MASTER_ADDR, MASTER_PORT"),
        (
            {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK < LOCAL_WORLD_SIZE .* found LOCAL_RANK=2",
        ),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE <= WORLD_SIZE=4, .* LOCAL_WORLD_SIZE=8"),
    ],
)
def test_variables_that_do_not_fit_together_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        torch_place(TORCH | changes)


# ── slurm ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


STEP = {
    "SLURM_JOB_ID": "70000", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_STEP_NODELIST": "gpu[03-05],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip


def test_node_lists_are_expanded():
    assert node_names("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert node_names("r[1-2]n[08-10]") == ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]
    assert node_names("") == []


def test_counts_of_tasks_are_expanded():
    assert task_counts({"T": "2(x3),1,4"}, "T") == [2, 2, 2, 1, 4]
    assert task_counts({}, "T") == [1]
    with pytest.raises(ConfigError, match=r"T='2\(3\)' must have Slurm's format"):
        task_counts({"T": "2(3)"}, "T")


def test_a_task_gets_its_place_on_nodes_with_different_numbers_of_tasks():
    place = step_place(STEP)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (6, 7, 0, 1)
    assert place.host == "gpu03"


def test_one_task_alone_and_tasks_of_another_launcher_have_no_place():
    assert step_place(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert step_place({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    for name in ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "TORCHELASTIC_RUN_ID"):
        assert step_place(STEP | {name: "1"}) is None


@given(st.integers(1, 10**9), st.integers(1, 9999), st.integers(0, 30))
def test_jobs_that_run_at_once_meet_at_different_ports(job: int, later: int, step: int):
    places = [
        step_place(STEP | {"SLURM_JOB_ID": str(number), "SLURM_STEP_ID": str(of)})
        for number, of in ((job, step), (job + later, step), (job, step + 1))
    ]
    ports = {place.port for place in places if place is not None}
    assert len(ports) >= 2
    assert places[0] is not None
    assert places[1] is not None
    assert places[0].port != places[1].port
    assert all(20000 < port < 32768 for port in ports)
