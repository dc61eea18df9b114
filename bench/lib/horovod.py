"""How Horovod groups gradients: at the ticks of its cycle, whole ones in order, up to the fusion threshold.

What is documented of it (HOROVOD_CYCLE_TIME, HOROVOD_FUSION_THRESHOLD), for simulations; its coordinator costs nothing
here.
"""

import math
from collections.abc import Sequence

from sirtaki.autotune.knobs import MIB

CYCLE_S = 1e-3
FUSION_BYTES = 64 * MIB


def horovod_groups(
    ready_s: Sequence[float],
    sizes_bytes: Sequence[int],
    *,
    cycle_s: float = CYCLE_S,
    fusion_bytes: int = FUSION_BYTES,
) -> tuple[list[int], tuple[float, ...]]:
    """What is sent together, and the tick at which each gradient is noticed.

    Args:
        ready_s: when each gradient and all before it are ready, `(n_gradients,)`, ascending.
        sizes_bytes: `(n_gradients,)`.
        cycle_s: time between ticks.
        fusion_bytes: a group is no larger than that, unless it is one gradient.

    Returns:
        Index behind the last gradient of each group, and `(n_gradients,)` seconds.
    """
    ticks = [math.ceil(moment_s / cycle_s) for moment_s in ready_s]
    ends: list[int] = []
    together = 0
    for end, tick in enumerate(ticks, start=1):
        together += sizes_bytes[end - 1]
        if end == len(ticks) or ticks[end] != tick or together + sizes_bytes[end] > fusion_bytes:
            ends.append(end)
            together = 0
    return ends, tuple(tick * cycle_s for tick in ticks)
