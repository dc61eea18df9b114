import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.errors import ConfigError
from sirtaki.launchers import node_names, step_place, task_counts

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
    with pytest.raises(ConfigError, match=r"T='2\(3\)' is not of the form"):
        task_counts({"T": "2(3)"}, "T")


def test_a_task_knows_its_place_where_nodes_have_different_numbers_of_them():
    place = step_place(STEP)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (6, 7, 0, 1)
    assert place.first_node == "gpu03"


def test_one_task_has_no_place_nor_has_what_another_launcher_has_started():
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


def test_variables_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="SLURM_NODEID=4 does not go with"):
        step_place(STEP | {"SLURM_NODEID": "4"})
