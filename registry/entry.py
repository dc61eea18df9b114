"""What is remembered of one tuned job, and the key under which it is found again."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sirtaki.errors import RegistryError
from sirtaki.link_model import LinkModel

from .digest import canonical_json, digest
from .graph import Graph
from .topology import Topology

# An entry that a newer one cannot beat still gives way to it after this time: networks and drivers change.
STALE_AFTER_S = 90 * 24 * 3600.0

# No setting is that much faster than the untuned default: such an entry comes from a hiccup, or from a stranger.
MAX_SPEEDUP = 100.0

# By so much another host's clock may be ahead.
MAX_AHEAD_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryKey:
    """What must be equal for a job's settings to be used as they are.

    Attributes:
        model: fingerprint of the model graph.
        topology: fingerprint of the topology.
        world_size: number of ranks.
        dtype: name of the element type as it travels.
        device: "cpu" or "cuda".
        versions: library versions that matter, as pairs sorted by name.
        gradients: `digest.gradients_fingerprint` of the gradients that are reduced; empty in entries of old releases.
        fixed: knobs that the user has fixed and their values, as pairs sorted by name.
        condition: how long communication took against the job's usual, such as "4×", if it had changed in mid-job;
            empty = as usual. Jobs look up what is usual; the others are proposals to them, like those of similar jobs.
    """

    model: str
    topology: str
    world_size: int
    dtype: str
    device: str
    versions: tuple[tuple[str, str], ...] = ()
    gradients: str = ""
    fixed: tuple[tuple[str, str], ...] = ()
    condition: str = ""

    def digest(self) -> str:
        """A digest that is equal exactly for equal keys."""
        return digest("key", canonical_json(self.to_json()))[:32]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; what is empty of the last three fields is left out, so that old entries keep their ids."""
        return {
            "model": self.model,
            "topology": self.topology,
            "world_size": self.world_size,
            "dtype": self.dtype,
            "device": self.device,
            "versions": dict(self.versions),
            **({"gradients": self.gradients} if self.gradients else {}),
            **({"fixed": dict(self.fixed)} if self.fixed else {}),
            **({"condition": self.condition} if self.condition else {}),
        }


def make_key(
    model: Graph,
    topology: Topology,
    *,
    dtype: str,
    device: str,
    versions: Mapping[str, str] | None = None,
    gradients: str = "",
    fixed: Mapping[str, str] | None = None,
) -> EntryKey:
    """The key of a job of this model on this cluster; the other arguments are `EntryKey`'s."""
    return EntryKey(
        model=model.fingerprint(),
        topology=topology.fingerprint(),
        world_size=topology.world_size,
        dtype=dtype,
        device=device,
        versions=tuple(sorted((versions or {}).items())),
        gradients=gradients,
        fixed=tuple(sorted((fixed or {}).items())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where an entry comes from.

    Attributes:
        created_s: seconds since the epoch.
        model_name: class name of the model, for people; empty if unknown.
        host_kinds: kinds of the hosts, each once, sorted.
        versions: versions of everything that took part, sorted by name; more than the key's.
    """

    created_s: float = field(default_factory=time.time)
    model_name: str = ""
    host_kinds: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The winner of one job's warm-up.

    Attributes:
        key: where it is found again.
        model: the model's graph; its fingerprint is `key.model`.
        topology: the cluster; its fingerprint is `key.topology`.
        layout: `layout_fingerprint` of the gradient layout that explicit cuts fit, empty if unknown.
        knobs: the best knobs, as `Knobs.to_json` gives them.
        best_span_s: their span.
        default_span_s: the untuned default's span in the same job.
        noise_s: noise of these spans.
        n_trials: trials that ran, those of cut-short jobs before included.
        arm: the arm that proposed the best knobs.
        complete: False if the job ended before its warm-up; the next job goes on from `trials`.
        trials: finished trials as JSON: arm, knobs, iterations, span_s (null where it failed), noise_s, status,
            was_best. May be empty.
        link: the link as measured, if it was.
    """

    key: EntryKey
    model: Graph
    topology: Topology
    knobs: Mapping[str, Any]
    best_span_s: float
    default_span_s: float
    noise_s: float = 0.0
    n_trials: int = 0
    arm: str = ""
    complete: bool = True
    layout: str = ""
    trials: tuple[Mapping[str, Any], ...] = ()
    link: LinkModel | None = None
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        for name in ("best_span_s", "default_span_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise RegistryError(f"{name} must be positive and finite, not {getattr(self, name)}")
        if not 0 <= self.noise_s < math.inf:
            raise RegistryError(f"noise_s must not be negative or infinite: {self.noise_s}")

    @cached_property
    def id(self) -> str:
        """The key's digest; what people call the entry by (its first characters suffice)."""
        return self.key.digest()

    @property
    def speedup(self) -> float:
        """How many times faster than the untuned default; comparable between jobs, as both are of one job."""
        return self.default_span_s / self.best_span_s

    @property
    def relative_noise(self) -> float:
        """Noise as a fraction of the best span."""
        return self.noise_s / self.best_span_s

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `entry_schema.entry_from_json` is its inverse."""
        return {
            **self.body_to_json(),
            "model": self.model.to_json(),
            "topology": self.topology.to_json(),
        }

    def body_to_json(self) -> dict[str, Any]:
        """All but the two graphs, which a store keeps once for all entries that share them."""
        return {
            "key": self.key.to_json(),
            "layout": self.layout,
            "knobs": dict(self.knobs),
            "best_span_s": self.best_span_s,
            "default_span_s": self.default_span_s,
            "noise_s": self.noise_s,
            "n_trials": self.n_trials,
            "arm": self.arm,
            "complete": self.complete,
            "trials": [dict(trial) for trial in self.trials],
            "link": None if self.link is None else _link_to_json(self.link),
            "provenance": {
                "created_s": self.provenance.created_s,
                "model_name": self.provenance.model_name,
                "host_kinds": list(self.provenance.host_kinds),
                "versions": dict(self.provenance.versions),
            },
        }

    def describe(self) -> str:
        """The job in a few words: `ResNet on 8 ranks on 2 hosts`."""
        name = self.provenance.model_name or f"model {self.key.model[:8]}"
        return f"{name} on {self.topology.describe()}"


def _link_to_json(link: LinkModel) -> dict[str, Any]:
    """What is the link's; how busy its hosts are is theirs, and earlier releases refuse fields they do not know."""
    return {name: value for name, value in link.to_json().items() if name != "busy"}


def implausible(entry: Entry) -> str:
    """What no job can have found, in words; empty if there is nothing of the kind."""
    if entry.provenance.created_s > time.time() + MAX_AHEAD_S:
        return f"provenance.created_s: {entry.provenance.created_s:.0f} is in the future"
    if not 1 / MAX_SPEEDUP <= entry.speedup <= MAX_SPEEDUP:
        return f"best_span_s: {entry.speedup:.3g} times as fast as default_span_s is more than tuning can gain or lose"
    return ""


def supersedes(new: Entry, old: Entry) -> bool:
    """Whether `new` takes the place of `old` under the same key.

    A complete entry replaces an incomplete one, never the other way. Of two incomplete ones the longer search wins
    (a job that goes on holds the earlier job's trials). Of two that agree on the knobs the newer one knows better what
    they are worth; an implausible one gives way. Otherwise the better wins if it is better by more than the noise,
    else the newer; if there are months between them always the newer. What a job has run and found wanting gives way
    whatever it claims, but that only the job knows (`Store.save`).
    """
    if new.complete != old.complete:
        return new.complete
    if implausible(old):
        return True
    if not new.complete and new.n_trials != old.n_trials:
        return new.n_trials > old.n_trials
    age_s = new.provenance.created_s - old.provenance.created_s
    if abs(age_s) > STALE_AFTER_S or new.knobs == old.knobs:
        return age_s >= 0
    noise = 1 + new.relative_noise + old.relative_noise
    if new.speedup > old.speedup * noise or old.speedup > new.speedup * noise:
        return new.speedup > old.speedup
    return age_s >= 0
