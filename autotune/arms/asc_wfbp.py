"""ASC-WFBP: choose for each gradient between sending it, merging it, and sending it beside the one before.

It holds the paper's two-way rule (eq. 21-40, listing 1) and our generalisation to the measured concurrency curve G(n).
References are to the ASC-WFBP paper.

Where the printed listing contradicts the text, the text holds: line 8 adds τ_b[l] and t_b[l − 1], eq. (21) means the
time at which layer l − 1 is ready; line 12 adds t_b to τ_c, eq. (17) and (29) to τ_b. A penalty counts only while the
other message still runs, which eq. (13) presupposes, and after merging "layer l + 1" is the message before this one.
That these types are optimal (theorem 1) does not hold under the paper's own model: docs/explanation/planners.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum

from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel

from ..knobs import Cut
from ..model.planning import PlanningModel
from .mg_wfbp import merge_gradients, merge_optimally
from .planner import Planner, cuts_for_groups

VISIBLE_STARTUP = (1.0, 0.5, 0.25, 0.125)  # parts of α that other sets of streams may leave unhidden


class LayerType(Enum):
    """Definitions 1 to 3."""

    NORMAL = "l_n"
    MERGED = "l_m"
    SIMULTANEOUS = "l_s"


def layer_types(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], *, alpha_s: float, beta_s_per_byte: float, gamma: float
) -> list[LayerType]:
    """Listing 1 in O(n): the type of each gradient, in the order of the backward pass.

    CALCCOMMTIME need not be run anew for each layer: a decision changes nothing but the message that the next
    gradient joins or follows, which is what is carried along here.

    Args:
        ready_s: when each gradient and all before it are ready (τ_b + t_b), `(n_gradients,)`, ascending.
        sizes_bytes: `(n_gradients,)`.
        alpha_s: a.
        beta_s_per_byte: b.
        gamma: γ, how much slower each of two simultaneous messages is.
    """
    types: list[LayerType] = []
    message_bytes = 0
    before_s, before_bytes = 0.0, 0  # τ_c and size of the message before this one
    for i in range(len(ready_s) - 1):
        message_bytes += sizes_bytes[i]
        start_s, next_ready_s = ready_s[i], ready_s[i + 1]
        alone_s = alpha_s + beta_s_per_byte * message_bytes
        before_alone_s = alpha_s + beta_s_per_byte * before_bytes
        overlap = max(0.0, 1 - (start_s - before_s) / before_alone_s) if before_bytes else 0.0
        penalty_s = (gamma - 1) * beta_s_per_byte * before_bytes * overlap  # eq. (13)
        q1 = start_s + alone_s <= next_ready_s  # eq. (21)
        q2 = next_ready_s < start_s + alpha_s  # eq. (24)
        q3 = start_s + alone_s + penalty_s < next_ready_s  # eq. (27), as (17) and (29) have it
        if message_bytes == 0 or (not q1 and q2 and not q3):
            types.append(LayerType.MERGED)  # eq. (38)
            continue
        types.append(LayerType.NORMAL if q1 else LayerType.SIMULTANEOUS)  # eq. (37), (39)
        before_s, before_bytes, message_bytes = start_s, message_bytes, 0
    types.append(LayerType.SIMULTANEOUS)  # line 18
    return types


def two_way_cuts(layout: GradientLayout, ready_s: Sequence[float], link: LinkModel) -> tuple[Cut, ...]:
    """The paper's plan: messages by listing 1, on two streams in turn."""
    types = layer_types(
        ready_s,
        [size * layout.itemsize_bytes for size in layout.sizes],
        alpha_s=link.startup_s,
        beta_s_per_byte=link.beta_s_per_byte,
        gamma=link.gamma,
    )
    ends = [i + 1 for i, layer_type in enumerate(types) if layer_type is not LayerType.MERGED]
    return cuts_for_groups(layout, ends, streams=2)


class AscWfbp(Planner):
    """Proposes the paper's two-way plan."""

    name = "asc_wfbp"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """Messages by listing 1 on two streams."""
        if self.space.streams_on(route)[-1] < 2:
            raise TuningError("simultaneous communication needs two streams, one is permitted")
        return two_way_cuts(model.layout, model.profile.issuable_s, model.links[route])


class AscWfbpN(Planner):
    """Our N-way generalisation: units *and* streams, on the concurrency curve G(n).

    n streams are divided into n / s sets of s. A group of merged gradients is cut into s slices that fill a set
    side by side, so it pays one start-up; groups take the sets in turn, so that the start-up of one hides behind the
    transmission of another. To the merging rule all sets together are one link of rate G(n) whose start-up is hidden
    to some part; which part, n and s the simulator picks. MG-WFBP's and the two-way plan compete too. With a contention
    model the winner is tried with each permitted thread count, one for all units.
    """

    name = "asc_wfbp_n"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """The best candidate in the simulator; of equals the one with the fewest units."""
        simulator = model.simulator(route)

        def cost(cuts: tuple[Cut, ...]) -> tuple[float, int]:
            return round(simulator.run_cuts(cuts).span_s, 6), len(cuts)

        best = min(dict.fromkeys(self._candidates(model, route)), key=cost)  # the first of equals
        return min((tuple(replace(cut, threads=r) for cut in best) for r in self.allocations(model)), key=cost)

    def _candidates(self, model: PlanningModel, route: Route) -> Iterator[tuple[Cut, ...]]:
        layout, ready_s, link = model.layout, model.profile.issuable_s, model.links[route]
        permitted = self.space.streams_on(route)
        sizes_bytes = [size * layout.itemsize_bytes for size in layout.sizes]
        beta_s_per_byte = link.beta_s_per_byte
        merged = merge_gradients(ready_s, sizes_bytes, alpha_s=link.startup_s, beta_s_per_byte=beta_s_per_byte)
        yield cuts_for_groups(layout, merged, streams=1)
        if permitted[-1] >= 2:
            yield two_way_cuts(layout, ready_s, link)
        for streams in permitted:
            beta_s_per_byte = 1 / link.total_bytes_per_s(streams)
            for visible in VISIBLE_STARTUP if streams > 1 else (1.0,):
                alpha_s = visible * link.startup_s
                ends = merge_optimally(ready_s, sizes_bytes, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)
                for slices in (s for s in range(1, streams + 1) if streams % s == 0):
                    yield cuts_for_groups(layout, ends, streams=streams, slices=slices)
