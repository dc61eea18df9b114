"""Every communicator does what the protocol says, whatever carries it."""

from rank_jobs import OVER_MESH, Job, Play, RankCase, on_ranks, slow


def mesh(ranks: int) -> Job:
    return Job(ranks, "mesh", env=OVER_MESH)


def mpi(ranks: int) -> Job:
    return Job(ranks, "mpi")


@on_ranks("communicator", mesh(3), mpi(3), slow(mesh(4)), slow(mesh(1)), slow(mesh(2)), slow(mesh(5)), slow(mpi(4)))
def test_communicators_conform(rank_case: RankCase, play: Play) -> None:
    play(rank_case)


@on_ranks("communicator", slow(mesh(3)), slow(mesh(4)), slow(mpi(4)), cases="STRESS")
def test_communicators_bear_stress(rank_case: RankCase, play: Play) -> None:
    play(rank_case)
