"""What the registry remembers of a job, its checked JSON form, and files of exchange."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import IO, Any, TypeVar

from sirtaki.errors import RegistryError
from sirtaki.measures import LinkModel

from .graph import Graph, canonical_json, digest
from .topology import MAX_RANKS, Topology

MAX_TEXT_CHARS = 1_000
HIGHEST = 1e18


def checked_fields(path: str, data: object, names: Sequence[str], *, optional: Sequence[str] = ()) -> Mapping[str, Any]:
    """An object with exactly these fields, and perhaps the optional ones."""
    if not isinstance(data, Mapping):
        raise RegistryError(f"{path}: must be an object, not {shown(data)}")
    missing = [name for name in names if name not in data]
    if missing:
        raise RegistryError(f"{path}: lacks {', '.join(missing)}")
    unknown = [name for name in data if name not in names and name not in optional]
    if unknown:
        raise RegistryError(f"{path}: has the unknown field {shown(unknown[0])}")
    return data


def checked_list(path: str, data: object, most: int) -> list[Any]:
    """A list of at most so many."""
    if not isinstance(data, list) or len(data) > most:
        raise RegistryError(f"{path}: must be a list of at most {most}, not {shown(data)}")
    return data


def checked_whole(path: str, value: object, *, low: int = 0, high: int) -> int:
    """A whole number from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:  # True is no number here
        raise RegistryError(f"{path}: must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def checked_number(path: str, value: object, *, low: float = 0.0, high: float = HIGHEST) -> float:
    """A number from `low` to `high`; NaN is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN is neither
        raise RegistryError(f"{path}: must be a number from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def checked_flag(path: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise RegistryError(f"{path}: must be true or false, not {shown(value)}")
    return value


def checked_text(path: str, value: object) -> str:
    """Printable text of limited length."""
    # Unprintable characters could play tricks on a terminal, and some databases refuse them.
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS or not value.isprintable():
        raise RegistryError(
            f"{path}: must be printable text of at most {MAX_TEXT_CHARS} characters, not {shown(value)}"
        )
    return value


def checked_choice(path: str, value: object, choices: Sequence[str]) -> str:
    """One of these."""
    if value not in choices:
        raise RegistryError(f"{path}: must be one of {', '.join(choices)}, not {shown(value)}")
    return str(value)


def checked_pairs(path: str, data: object) -> tuple[tuple[str, str], ...]:
    """An object of texts, as pairs sorted by name."""
    if not isinstance(data, Mapping) or len(data) > 100:
        raise RegistryError(f"{path}: must be an object of at most 100 names and texts, not {shown(data)}")
    return tuple(
        sorted((checked_text(f"{path} (a name)", name), checked_text(f"{path}.{name}", data[name])) for name in data)
    )


def shown(value: object) -> str:
    """A value in a message, cut short: it may be megabytes, and may hold control characters."""
    if isinstance(value, list | Mapping):
        return f"{type(value).__name__} of {len(value)}"
    return ascii(value)[:80]


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


_T = TypeVar("_T")

MAX_TRIALS = 10_000
MAX_CUTS = 100_000
_LOWEST_RATE = 1e-9

_ALGORITHMS = ("flat", "hierarchical")
_TRANSPORTS = ("shared_memory", "gloo", "mpi", "nccl", "staged")
_STATUSES = ("complete", "pruned", "failed")
_BODY_FIELDS = (
    *("key", "layout", "knobs", "best_span_s", "default_span_s", "noise_s", "n_trials"),
    *("arm", "complete", "trials", "link", "provenance"),
)


def entry_from_json(data: object) -> Entry:
    """The entry that `Entry.to_json` described.

    Raises:
        RegistryError: a field is missing, unknown or has an invalid value, or no job can have found this;
            the message names it.
    """
    fields = checked_fields("entry", data, (*_BODY_FIELDS, "model", "topology"))
    entry = body_from_json(
        {name: fields[name] for name in _BODY_FIELDS},
        model=_named("model", Graph.from_json, fields["model"]),
        topology=_named("topology", Topology.from_json, fields["topology"]),
    )
    if not entry.model.is_acyclic:
        raise RegistryError("model: a model's graph is directed and has no cycle")
    if entry.model.fingerprint() != entry.key.model:
        raise RegistryError("key.model: is not the fingerprint of the model's graph")
    if entry.topology.fingerprint() != entry.key.topology:
        raise RegistryError("key.topology: is not the fingerprint of the topology")
    if entry.topology.world_size != entry.key.world_size:
        raise RegistryError(f"key.world_size: {entry.key.world_size}, but the topology has {entry.topology.world_size}")
    if why := implausible(entry):
        raise RegistryError(why)
    return entry


def body_from_json(data: object, *, model: Graph, topology: Topology) -> Entry:
    """The entry that `Entry.body_to_json` described, of this model and topology.

    Raises:
        RegistryError: as in `entry_from_json`.
    """
    fields = checked_fields("entry", data, _BODY_FIELDS)
    return Entry(
        key=_key(fields["key"]),
        model=model,
        topology=topology,
        layout=checked_text("layout", fields["layout"]),
        knobs=checked_knobs("knobs", fields["knobs"]),
        best_span_s=checked_number("best_span_s", fields["best_span_s"], low=1e-9),
        default_span_s=checked_number("default_span_s", fields["default_span_s"], low=1e-9),
        noise_s=checked_number("noise_s", fields["noise_s"]),
        n_trials=checked_whole("n_trials", fields["n_trials"], high=10**9),
        arm=checked_text("arm", fields["arm"]),
        complete=checked_flag("complete", fields["complete"]),
        trials=tuple(
            _trial(f"trials[{index}]", item)
            for index, item in enumerate(checked_list("trials", fields["trials"], MAX_TRIALS))
        ),
        link=None if fields["link"] is None else _link(fields["link"]),
        provenance=_provenance(fields["provenance"]),
    )


def checked_knobs(path: str, data: object) -> dict[str, Any]:
    """A copy of knobs as `Knobs.to_json` gives them, `path` being their name in messages.

    Raises:
        RegistryError: as in `entry_from_json`.
    """
    fields = checked_fields(path, data, ("unit_bytes", "streams", "threads", "algorithm", "transport", "cuts"))
    streams = checked_whole(f"{path}.streams", fields["streams"], low=1, high=1024)
    return {
        "unit_bytes": checked_whole(f"{path}.unit_bytes", fields["unit_bytes"], low=1, high=2**40),
        "streams": streams,
        "threads": _threads(f"{path}.threads", fields["threads"]),
        "algorithm": checked_choice(f"{path}.algorithm", fields["algorithm"], _ALGORITHMS),
        "transport": checked_choice(f"{path}.transport", fields["transport"], _TRANSPORTS),
        "cuts": None if fields["cuts"] is None else _cuts(f"{path}.cuts", fields["cuts"], streams),
    }


def _cuts(path: str, data: object, streams: int) -> list[list[int | None]]:
    cuts: list[list[int | None]] = []
    end = 0
    for index, item in enumerate(checked_list(path, data, MAX_CUTS)):
        here = f"{path}[{index}]"
        if len(checked_list(here, item, 3)) != 3:
            raise RegistryError(f"{here}: must be a list of stop, stream and threads")
        stop = checked_whole(f"{here}.stop", item[0], low=end + 1, high=2**48)
        stream = checked_whole(f"{here}.stream", item[1], high=streams - 1)
        cuts.append([stop, stream, _threads(f"{here}.threads", item[2])])
        end = stop
    return cuts


def _trial(path: str, data: object) -> dict[str, Any]:
    fields = checked_fields(path, data, ("arm", "knobs", "iterations", "span_s", "noise_s", "status", "was_best"))
    span_s = fields["span_s"]
    return {
        "arm": checked_text(f"{path}.arm", fields["arm"]),
        "knobs": checked_knobs(f"{path}.knobs", fields["knobs"]),
        "iterations": checked_whole(f"{path}.iterations", fields["iterations"], high=10**9),
        "span_s": None if span_s is None else checked_number(f"{path}.span_s", span_s),
        "noise_s": checked_number(f"{path}.noise_s", fields["noise_s"]),
        "status": checked_choice(f"{path}.status", fields["status"], _STATUSES),
        "was_best": checked_flag(f"{path}.was_best", fields["was_best"]),
    }


def _key(data: object) -> EntryKey:
    fields = checked_fields(
        "key",
        data,
        ("model", "topology", "world_size", "dtype", "device", "versions"),
        optional=("gradients", "fixed", "condition"),  # older releases know none
    )
    return EntryKey(
        model=checked_text("key.model", fields["model"]),
        topology=checked_text("key.topology", fields["topology"]),
        world_size=checked_whole("key.world_size", fields["world_size"], low=1, high=MAX_RANKS),
        dtype=checked_text("key.dtype", fields["dtype"]),
        device=checked_text("key.device", fields["device"]),
        versions=checked_pairs("key.versions", fields["versions"]),
        gradients=checked_text("key.gradients", fields.get("gradients", "")),
        fixed=checked_pairs("key.fixed", fields.get("fixed", {})),
        condition=checked_text("key.condition", fields.get("condition", "")),
    )


def _link(data: object) -> LinkModel:
    if isinstance(data, Mapping) and "latency_s" in data:  # as older releases write it
        return _old_link(data)
    fields = checked_fields("link", data, ("alpha_s", "throughput", "host_s", "residual"))
    return LinkModel(
        alpha_s=checked_number("link.alpha_s", fields["alpha_s"]),
        throughput=_rates("link.throughput", fields["throughput"]),
        host_s=checked_number("link.host_s", fields["host_s"]),
        residual=checked_number("link.residual", fields["residual"]),
    )


def _old_link(data: object) -> LinkModel:
    fields = checked_fields("link", data, ("latency_s", "bandwidth_bytes_per_s", "concurrency"))
    alone = checked_number("link.bandwidth_bytes_per_s", fields["bandwidth_bytes_per_s"], low=_LOWEST_RATE)
    gains = _rates("link.concurrency", fields["concurrency"] or [1.0])
    return LinkModel(
        alpha_s=checked_number("link.latency_s", fields["latency_s"]),
        throughput=tuple(min(max(alone * gain, _LOWEST_RATE), HIGHEST) for gain in gains),
    )


def _rates(path: str, data: object) -> tuple[float, ...]:
    rates = checked_list(path, data, 1024)
    if not rates:
        raise RegistryError(f"{path}: must not be empty")
    return tuple(checked_number(f"{path}[{index}]", rate, low=_LOWEST_RATE) for index, rate in enumerate(rates))


def _provenance(data: object) -> Provenance:
    fields = checked_fields("provenance", data, ("created_s", "model_name", "host_kinds", "versions"))
    return Provenance(
        created_s=checked_number("provenance.created_s", fields["created_s"], high=1e11),
        model_name=checked_text("provenance.model_name", fields["model_name"]),
        host_kinds=tuple(
            checked_text(f"provenance.host_kinds[{index}]", item)
            for index, item in enumerate(checked_list("provenance.host_kinds", fields["host_kinds"], MAX_RANKS))
        ),
        versions=checked_pairs("provenance.versions", fields["versions"]),
    )


def _threads(path: str, value: object) -> int | None:
    return None if value is None else checked_whole(path, value, low=1, high=2**20)


def _named(path: str, parse: Callable[[object], _T], data: object) -> _T:
    try:
        return parse(data)
    except RegistryError as err:
        raise RegistryError(f"{path}: {err}") from err


LIKE = 1.25
"""Rows are touched alike where numbers of them differ by this factor at most."""

LIKE_COVERAGE = 0.1
"""And parts of all touches by this at most: so much may hot rows lose until they are ranked anew."""

HOT_COLD, BLOCKS = "hot_cold", "blocks"
PATHS = ("gather", "owner", HOT_COLD, BLOCKS, "dense")
COLD_PATHS = ("gather", "owner")

MAX_POINTS = 1000
MAX_ROWS = 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How rows of one parameter are touched.

    Attributes:
        touched: in an iteration by all ranks together, one that several ranks touch counted for each; mean.
        union: by any rank, mean.
        curve: which part of all touches the most touched rows have: `(rows, part)`, both ascending, from one row on.

    Raises:
        RegistryError: there is no curve, or it does not ascend.
    """

    touched: float
    union: float
    curve: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not (self.touched > 0 and self.union > 0 and self.curve):
            raise RegistryError("skew: nothing was touched")
        if any(rows >= more or part > larger for (rows, part), (more, larger) in pairwise(self.curve)):
            raise RegistryError("skew.curve: must ascend")

    def covered(self, rows: int) -> float:
        """Which part of all touches that many rows have; between points by the logarithm of the rows."""
        if rows >= self.curve[-1][0]:
            return 1.0
        below, part = self.curve[0]
        for above, larger in self.curve:
            if rows < above:
                between = math.log(rows / below) / math.log(above / below) if rows > below else 0.0
                return part + between * (larger - part)
            below, part = above, larger
        return 1.0

    def distance(self, other: Skew) -> float:
        """0 = the same, up to 1 = alike."""
        counts = (
            abs(math.log(here / there)) / math.log(LIKE)
            for here, there in ((self.touched, other.touched), (self.union, other.union))
        )
        sizes = {rows for rows, _ in (*self.curve, *other.curve)}
        coverage = max(abs(self.covered(rows) - other.covered(rows)) for rows in sizes)
        return max(*counts, coverage / LIKE_COVERAGE)

    def bucket(self) -> list[int]:
        """Equal or next to each other for skews that are alike."""
        middle = max(1, round(math.sqrt(self.curve[-1][0])))
        counts = (round(math.log(count) / math.log(LIKE)) for count in (self.touched, self.union))
        return [*counts, round(self.covered(middle) / LIKE_COVERAGE)]


_KEY_FIELDS = ("topology", "ranks", "n_rows", "row_bytes", "dtype", "aggregator")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsKey:
    """What must be equal for a way to be looked at.

    Attributes:
        topology: fingerprint of the topology.
        ranks: that add up rows.
        n_rows: of the parameter.
        row_bytes: of one.
        dtype: name of the element type.
        aggregator: one is there that may sum hot rows.
        versions: library versions that matter, as pairs sorted by name.
        fixed: knobs that the user has fixed and their values, as pairs sorted by name.
    """

    topology: str
    ranks: int
    n_rows: int
    row_bytes: int
    dtype: str
    aggregator: bool = False
    versions: tuple[tuple[str, str], ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()

    def digest(self) -> str:
        """A digest that is equal exactly for equal keys."""
        return digest("rows", canonical_json(self.to_json()))[:32]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            **{name: getattr(self, name) for name in _KEY_FIELDS},
            "versions": dict(self.versions),
            "fixed": dict(self.fixed),
        }


_WAY_FIELDS = ("name", "path", "cold", "aggregated", "block_rows", "n_hot", "span_s", "created_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWay:
    """The way of one parameter's rows that was the fastest of those that a job tried; a plan without its hot rows.

    Attributes:
        key: where it is found again.
        name: of the parameter.
        skew: how its rows were touched.
        path: the way, one of `PATHS`.
        cold: that of rows that are not hot, one of `COLD_PATHS`.
        aggregated: an aggregator summed the hot rows.
        block_rows: consecutive rows in a block.
        n_hot: how many rows were hot.
        span_s: how long a reduction took, the median of trials.
        created_s: seconds since the epoch.
    """

    key: RowsKey
    name: str
    skew: Skew
    path: str
    cold: str
    block_rows: int
    n_hot: int
    span_s: float
    aggregated: bool = False
    created_s: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        """One way is kept for each: parameter, and kind of skew."""
        return digest("row way", self.key.digest(), self.name, canonical_json(self.skew.bucket()))[:32]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `way_from_json` is its inverse."""
        return {
            "key": self.key.to_json(),
            "skew": {
                "touched": self.skew.touched,
                "union": self.skew.union,
                "curve": [list(point) for point in self.skew.curve],
            },
            **{name: getattr(self, name) for name in _WAY_FIELDS},
        }


def way_from_json(data: object) -> RowWay:
    """The way that `RowWay.to_json` described.

    Raises:
        RegistryError: a field is missing, unknown or has an invalid value, or no job can have found this;
            the message names it.
    """
    fields = checked_fields("way", data, ("key", "skew", *_WAY_FIELDS))
    key = _way_key(fields["key"])
    hot = fields["path"] == HOT_COLD
    aggregated = checked_flag("aggregated", fields["aggregated"])
    if aggregated and not (hot and key.aggregator):
        raise RegistryError(f"aggregated: only of {HOT_COLD} where the key has an aggregator")
    created_s = checked_number("created_s", fields["created_s"])
    if created_s > time.time() + MAX_AHEAD_S:
        raise RegistryError(f"created_s: {created_s:.0f} is in the future")
    return RowWay(
        key=key,
        name=checked_text("name", fields["name"]),
        skew=_skew(fields["skew"], most=key.n_rows),
        path=checked_choice("path", fields["path"], PATHS),
        cold=checked_choice("cold", fields["cold"], COLD_PATHS),
        aggregated=aggregated,
        block_rows=checked_whole("block_rows", fields["block_rows"], low=1, high=MAX_ROWS),
        n_hot=checked_whole("n_hot", fields["n_hot"], low=int(hot), high=key.n_rows if hot else 0),
        span_s=checked_number("span_s", fields["span_s"]),
        created_s=created_s,
    )


def nearest_way(found: Iterable[RowWay], skew: Skew, *, name: str) -> RowWay | None:
    """Of parameters whose rows are touched like that, and not too old: of this name first, else the nearest."""
    since_s = time.time() - STALE_AFTER_S
    alike = [
        (way.name != name, distance, way)
        for way in found
        if way.created_s >= since_s and (distance := way.skew.distance(skew)) <= 1.0
    ]
    return min(alike, key=lambda ranked: ranked[:2])[2] if alike else None


def _way_key(data: object) -> RowsKey:
    fields = checked_fields("key", data, (*_KEY_FIELDS, "versions", "fixed"))
    return RowsKey(
        topology=checked_text("key.topology", fields["topology"]),
        ranks=checked_whole("key.ranks", fields["ranks"], low=1, high=MAX_RANKS),
        n_rows=checked_whole("key.n_rows", fields["n_rows"], low=1, high=MAX_ROWS),
        row_bytes=checked_whole("key.row_bytes", fields["row_bytes"], high=MAX_ROWS),
        dtype=checked_text("key.dtype", fields["dtype"]),
        aggregator=checked_flag("key.aggregator", fields["aggregator"]),
        versions=checked_pairs("key.versions", fields["versions"]),
        fixed=checked_pairs("key.fixed", fields["fixed"]),
    )


def _skew(data: object, *, most: int) -> Skew:
    """`most`: rows that there are."""
    fields = checked_fields("skew", data, ("touched", "union", "curve"))
    points = [checked_list("skew.curve", point, 2) for point in checked_list("skew.curve", fields["curve"], MAX_POINTS)]
    if any(len(point) != 2 for point in points):
        raise RegistryError("skew.curve: a point has rows and a part")
    return Skew(
        touched=checked_number("skew.touched", fields["touched"], low=1.0),
        union=checked_number("skew.union", fields["union"], low=1.0, high=most),
        curve=tuple(
            (
                checked_whole("skew.curve", rows, low=1, high=most),
                checked_number("skew.curve", part, high=1.0),
            )
            for rows, part in points
        ),
    )


FORMAT = "sirtaki-registry"
VERSION = 2
_LISTS = {1: ("entries",), VERSION: ("entries", "row_ways")}  # that a document of each version has

MAX_FILE_CHARS = 1 << 29
MAX_ENTRIES = 100_000


def write_document(entries: Iterable[Entry], ways: Iterable[RowWay], file: IO[str]) -> int:
    """Writes a document with one entry or way of rows a line; how many there were."""
    file.write(f'{{"format": "{FORMAT}", "version": {VERSION}, "entries": [')
    count = _write_lines(entries, file)
    file.write('], "row_ways": [')
    count += _write_lines(ways, file)
    file.write("]}\n")
    return count


def _write_lines(items: Iterable[Entry | RowWay], file: IO[str]) -> int:
    count = 0
    for item in items:
        file.write(",\n" if count else "\n")
        file.write(json.dumps(item.to_json(), allow_nan=False))
        count += 1
    file.write("\n")
    return count


def read_document(file: IO[str]) -> tuple[list[Entry], list[RowWay]]:
    """The entries and ways of rows of a document, all of them checked; documents of version 1 have no ways.

    Raises:
        RegistryError: it is no such document, or an entry or way has a field that is invalid; the message names both.
    """
    try:
        text = file.read(MAX_FILE_CHARS + 1)
    except UnicodeDecodeError as err:
        raise RegistryError(f"this is no text: {err}") from err
    if len(text) > MAX_FILE_CHARS:
        raise RegistryError(f"the document has more than {MAX_FILE_CHARS} characters")
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as err:
        raise RegistryError(f"this is not the JSON that `sirtaki registry export` writes: {err!s:.200}") from err
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RegistryError("this is not what `sirtaki registry export` writes: its format is not " + FORMAT)
    if type(data.get("version")) is not int or data["version"] not in _LISTS:
        raise RegistryError(f"the document's version is not 1 or {VERSION}: it was written by a newer release")
    lists = _LISTS[data["version"]]
    if set(data) != {"format", "version", *lists}:
        raise RegistryError(f"the document needs exactly the fields format, version and {' and '.join(lists)}")
    for name in lists:
        if not isinstance(data[name], list) or len(data[name]) > MAX_ENTRIES:
            raise RegistryError(f"{name} must be a list of at most {MAX_ENTRIES}")
    entries = _checked("entry", data["entries"], entry_from_json)
    return entries, _checked("way of rows", data.get("row_ways", []), way_from_json)


def _checked(what: str, data: list[object], read: Callable[[object], _T]) -> list[_T]:
    checked = []
    for number, item in enumerate(data, start=1):
        try:
            checked.append(read(item))
        except RegistryError as err:
            raise RegistryError(f"{what} {number}: {err}") from err
    return checked


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number here")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a field is there twice")
    return data
