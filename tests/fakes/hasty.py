"""Has iterations put off as soon as it is possible, so that short programs come to it."""

from sirtaki.comm.gradients import schedule as order
from sirtaki.engine.tuning import overlap as forward_overlap
from sirtaki.torch.optimizer import OverlappedOptimizer

_USUAL = (order.PROFILING_ITERATIONS, forward_overlap.PREPARING)


def be(hasty: bool) -> None:
    """In this process, for optimizers made from now on; where it is hasty nobody learns who reads what."""
    order.PROFILING_ITERATIONS, forward_overlap.PREPARING = (1, 0) if hasty else _USUAL
    OverlappedOptimizer._knows_reads = hasty
