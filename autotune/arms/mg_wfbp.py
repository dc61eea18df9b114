"""MG-WFBP: merge a gradient into the next one where waiting for that costs less than another start-up.

ASC-WFBP and LIBRA-M build on the rule. Reference: ASC-WFBP eq. (3)-(6), after Shi et al., MG-WFBP, INFOCOM 2019. One
stream, one message at a time. Beside the paper's rule stands the exact optimum of the same model, which the rule
misses where a chain of short waits adds up (`docs/decisions/0020`).
"""

from collections import deque
from collections.abc import Sequence

from sirtaki.comm.plan import Route

from ..knobs import Cut
from ..model.planning import PlanningModel
from .planner import Planner, cuts_for_groups


def merge_gradients(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], *, alpha_s: float, beta_s_per_byte: float
) -> list[int]:
    """The end of each merged group, as index behind its last gradient.

    The gradients come in the order of the backward pass: the paper's layer l is followed by l − 1.

    Args:
        ready_s: when each gradient and all before it are ready, `(n_gradients,)`, ascending.
        sizes_bytes: `(n_gradients,)`.
        alpha_s: the paper's a.
        beta_s_per_byte: the paper's b.
    """
    ends: list[int] = []
    free_s = 0.0  # when the message before this group is through
    group_bytes = 0
    for i in range(len(ready_s)):
        group_bytes += sizes_bytes[i]
        start_s = max(ready_s[i], free_s)  # τ_c of the group so far
        last = i == len(ready_s) - 1
        if not last and (ready_s[i + 1] < start_s + alpha_s or group_bytes == 0):  # eq. (5)
            continue
        ends.append(i + 1)
        free_s = start_s + alpha_s + beta_s_per_byte * group_bytes  # eq. (3)
        group_bytes = 0
    return ends


def merge_optimally(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], *, alpha_s: float, beta_s_per_byte: float
) -> list[int]:
    """The groups that finish first, exactly, in O(n); arguments and result as of `merge_gradients`.

    With S the bytes before a gradient and f(i) the earliest end of the first i gradients,
    `f(i) = min over j < i of max(ready_i, f(j)) + a + b · (S_i − S_j)`. Of all j with f(j) ≤ ready_i the largest is
    best; of the others the one with the least f(j) − b · S_j, which a monotone queue keeps at its head.
    """
    end_s, before_s, chosen = [0.0], [0.0], [0]  # f(i); b · S_i; the j that f(i) came from
    queue: deque[int] = deque()
    idle = 0  # the largest j after which the link waits for gradient i
    for i, (needed_s, size) in enumerate(zip(ready_s, sizes_bytes, strict=True), start=1):
        before_s.append(before_s[-1] + beta_s_per_byte * size)
        while queue and end_s[queue[-1]] - before_s[queue[-1]] >= end_s[i - 1] - before_s[i - 1]:
            queue.pop()
        queue.append(i - 1)
        while idle + 1 < i and end_s[idle + 1] <= needed_s:
            idle += 1
        while queue and queue[0] <= idle:
            queue.popleft()
        best, start_s = idle, needed_s - before_s[idle]
        if queue and end_s[queue[0]] - before_s[queue[0]] < start_s:
            best, start_s = queue[0], end_s[queue[0]] - before_s[queue[0]]
        chosen.append(best)
        end_s.append(start_s + alpha_s + before_s[i])
    ends: list[int] = []
    i = len(ready_s)
    while i > 0:
        ends.append(i)
        i = chosen[i]
    return ends[::-1]


class MgWfbp(Planner):
    """Proposes MG-WFBP's groups on one stream."""

    name = "mg_wfbp"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """One unit a group."""
        layout, link = model.layout, model.links[route]
        ends = merge_gradients(
            model.profile.issuable_s,
            [size * layout.itemsize_bytes for size in layout.sizes],
            alpha_s=link.startup_s,
            beta_s_per_byte=link.beta_s_per_byte,
        )
        return cuts_for_groups(layout, ends, streams=1)
