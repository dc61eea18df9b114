"""Defer updates from the first possible iteration, so that short programs reach deferred updates."""

from sirtaki.comm.gradients import schedule as order
from sirtaki.engine.tuning import overlap as forward_overlap
from sirtaki.torch.optimizer import OverlappedOptimizer

_USUAL = (order.PROFILING_ITERATIONS, forward_overlap.PREPARING)


def be(hasty: bool) -> None:
    """Switch early deferral on or off, for optimizers that this process creates from now on.

    With early deferral, optimizers do not learn which module reads which parameter.
    """
    order.PROFILING_ITERATIONS, forward_overlap.PREPARING = (1, 0) if hasty else _USUAL
    OverlappedOptimizer._knows_reads = hasty
