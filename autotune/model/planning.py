"""All that a planner knows about a job: its gradients, when they are ready, and what each route costs.

Planners are built before the warm-up has measured anything; the session hands them this once it has, and again when it
knows better.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Algorithm, Route, TransportKind
from sirtaki.errors import TuningError
from sirtaki.link_model import LinkModel

from .contention import ContentionModel
from .profile import Profile
from .shared_host import SharedHost
from .simulator import Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningModel:
    """The planners' view of one flat buffer.

    Attributes:
        layout: gradients in the order in which they become ready.
        profile: when they do.
        links: cost of the routes that have been measured; at least one.
        contention: LIBRA's model, or None where computation and communication do not slow each other down, or
            nobody has measured it.
        host: that all ranks share, where they communicate on the processors that compute; else None.

    Raises:
        TuningError: profile and layout are of different models, or no route has a link.
    """

    layout: GradientLayout
    profile: Profile
    links: Mapping[Route, LinkModel]
    contention: ContentionModel | None = None
    host: SharedHost | None = None

    def __post_init__(self) -> None:
        self.profile.check_fits(self.layout)
        if not self.links:
            raise TuningError("a planning model needs the link of at least one route")

    def simulator(self, route: Route) -> Simulator:
        """The iteration on that route."""
        return Simulator(
            layout=self.layout,
            profile=self.profile,
            link=self.links[route],
            contention=self.contention,
            host=self.host,
        )

    def link_between_hosts(self, route: Route) -> LinkModel | None:
        """The link of that route; None if it was not measured, or if units take processors that compute, too."""
        return None if self.host is not None else self.links.get(route)

    @property
    def bound_s(self) -> float:
        """What no plan's span falls below: the backward pass from its first gradient on, or all bytes at full rate.

        The rate is the best that any route has shown with any number of streams; it counts gradient bytes, so the
        2 (P − 1) / P of a ring is in it.
        """
        fastest = max(max(link.throughput) for link in self.links.values())
        compute_s = max(self.profile.ready_s) - min(self.profile.ready_s)
        return max(compute_s, self.layout.total_bytes / fastest)

    def differs_from(self, other: "PlanningModel") -> bool:
        """Whether plans should be made anew: another layout or route, or a parameter moved beyond its error.

        Ready times count as moved if one of them moved by more than a tenth of the backward pass.
        """
        if self.layout != other.layout or set(self.links) != set(other.links):
            return True
        if any(link.differs_from(other.links[route]) for route, link in self.links.items()):
            return True
        if (self.contention, self.host) != (other.contention, other.host):
            return True
        tolerance_s = 0.1 * max(self.profile.compute_s, other.profile.compute_s)
        pairs = zip(self.profile.ready_s, other.profile.ready_s, strict=True)
        return any(abs(mine - theirs) > tolerance_s for mine, theirs in pairs)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict, to be saved for "what if" questions and reports; `from_json` is its inverse."""
        layout = self.layout
        return {
            "layout": {
                "sizes": list(layout.sizes),
                "itemsize_bytes": layout.itemsize_bytes,
                "dtype": layout.dtype,
                "device": layout.device,
                "names": list(layout.names),
            },
            "profile": self.profile.to_json(),
            "links": [
                {"transport": transport.value, "algorithm": algorithm.value, "link": link.to_json()}
                for (transport, algorithm), link in self.links.items()
            ],
            "contention": None if self.contention is None else self.contention.to_json(),
            "host": None if self.host is None else self.host.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PlanningModel":
        """The model that `to_json` described.

        Raises:
            TuningError: a field is missing or has a value that is invalid.
        """
        try:
            layout, contention, host = data["layout"], data.get("contention"), data.get("host")
            return cls(
                layout=GradientLayout(
                    sizes=tuple(layout["sizes"]),
                    itemsize_bytes=layout["itemsize_bytes"],
                    dtype=layout["dtype"],
                    device=layout["device"],
                    names=tuple(layout["names"]),
                ),
                profile=Profile.from_json(data["profile"]),
                links={
                    (TransportKind(entry["transport"]), Algorithm(entry["algorithm"])): LinkModel.from_json(
                        entry["link"]
                    )
                    for entry in data["links"]
                },
                contention=None if contention is None else ContentionModel.from_json(contention),
                host=None if host is None else SharedHost.from_json(host),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise TuningError(f"this is not a saved planning model: {err!r}") from err
