"""All that a planner knows about a job: its gradients, when they are ready, and what each route costs.

A module of its own because planners are built before the warm-up has measured anything; this record is what the
session hands them once it has, and again when it knows better.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.errors import TuningError

from .contention import ContentionModel
from .link import LinkModel
from .profile import Profile
from .simulator import Simulator

Route = tuple[TransportKind, Algorithm]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningModel:
    """The planners' view of one flat buffer.

    Attributes:
        layout: gradients in the order in which they become ready.
        profile: when they do.
        links: cost of the routes that have been measured; at least one.
        contention: LIBRA's model, or None where computation and communication do not slow each other down, or
            nobody has measured it.

    Raises:
        TuningError: profile and layout are of different models, or no route has a link.
    """

    layout: GradientLayout
    profile: Profile
    links: Mapping[Route, LinkModel]
    contention: ContentionModel | None = None

    def __post_init__(self) -> None:
        self.profile.check_fits(self.layout)
        if not self.links:
            raise TuningError("a planning model needs the link of at least one route")

    def simulator(self, route: Route) -> Simulator:
        """The iteration on that route."""
        return Simulator(layout=self.layout, profile=self.profile, link=self.links[route], contention=self.contention)

    def differs_from(self, other: "PlanningModel") -> bool:
        """Whether plans should be made anew: another layout or route, or a parameter moved beyond its error.

        Ready times count as moved if one of them moved by more than a tenth of the backward pass.
        """
        if self.layout != other.layout or set(self.links) != set(other.links):
            return True
        if any(link.differs_from(other.links[route]) for route, link in self.links.items()):
            return True
        if self.contention != other.contention:
            return True
        tolerance_s = 0.1 * max(self.profile.compute_s, other.profile.compute_s)
        pairs = zip(self.profile.ready_s, other.profile.ready_s, strict=True)
        return any(abs(mine - theirs) > tolerance_s for mine, theirs in pairs)
