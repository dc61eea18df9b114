"""Every communicator meets the contract, over every carrier."""

from rank_jobs import OVER_MESH, Job, played_on_ranks, slow


def mesh(ranks: int) -> Job:
    return Job(ranks, "mesh", env=OVER_MESH)


def mpi(ranks: int) -> Job:
    return Job(ranks, "mpi")


test_communicators_conform = played_on_ranks(
    "communicator", mesh(3), mpi(3), slow(mesh(4)), slow(mesh(1)), slow(mesh(2)), slow(mesh(5)), slow(mpi(4))
)


test_communicators_bear_stress = played_on_ranks(
    "communicator", slow(mesh(3)), slow(mesh(4)), slow(mpi(4)), cases="STRESS"
)
