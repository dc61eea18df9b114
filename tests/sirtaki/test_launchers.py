import pytest

from sirtaki.errors import ConfigError
from sirtaki.launchers import check_world_size, place

SBATCH = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize(
    ("environ", "size", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, 1, r"WORLD_SIZE=2 .*torchrun.*`sirtakirun -np 2 python …`.*unset RANK"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            1,
            "OMPI_COMM_WORLD_SIZE says 4 .*sirtakirun -np 4",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 2, "MPI's world has 2"),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, 1, "PMI_SIZE says 3 ranks"),
        ({**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 1, "srun has started 8 tasks.*--mpi=pmix"),
        ({**SBATCH, "SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}, 1, "PMI_SIZE says 8"),
        ({**SBATCH, "SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "3"}, 1, "srun has started 8 tasks"),
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
        ({**SBATCH, "SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "0"}, 8),
        ({**SBATCH, "SLURM_STEP_NUM_TASKS": "4", "OMPI_COMM_WORLD_SIZE": "1"}, 1),  # below mpiexec's daemons
        ({**SBATCH, "SLURM_STEP_NUM_TASKS": "4", "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"WORLD_SIZE": "2"}, 1),  # somebody's setting: no rank goes with it
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "1"}, 1),  # mpiexec -np 1 said it later
        ({"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMI_SIZE": "?"}, 1),
    ],
)
def test_a_world_as_large_as_its_launcher_says_is_accepted(environ, size):
    check_world_size(size, environ)


def test_a_rank_reads_its_place_from_whichever_launcher_it_was():
    assert place("RANK", {"PMI_RANK": "3"}) == 3
    assert place("SIZE", {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "9"}) == 4
    assert place("LOCAL_RANK", {}) is None
