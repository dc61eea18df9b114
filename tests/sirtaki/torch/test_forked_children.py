"""Children that a rank forks take no part in the job, and training goes on as in one process."""

from rank_jobs import ONLY_OVER_MPI, OVER_MESH, UNTUNED, Job, played_on_ranks

ENV = {**UNTUNED, "SIRTAKI_HEARTBEAT_S": "20"}

test_children_of_ranks_take_no_part_in_the_job = played_on_ranks(
    "forked_children", Job(2, "mesh", {**ENV, **OVER_MESH}), cases="HVD_CASES"
)

test_children_of_ranks_under_pytorchs_wrappers_take_no_part_in_the_job = played_on_ranks(
    "forked_children", Job(2, "mesh", {**ENV, **OVER_MESH})
)

test_children_of_ranks_of_mpi_take_no_part_in_the_job = ONLY_OVER_MPI(
    played_on_ranks("forked_children", Job(2, env=ENV), cases="HVD_CASES")
)
