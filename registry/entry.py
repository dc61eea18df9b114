"""What the registry remembers of a job and its cluster, its checked JSON form, and files of exchange.

A `Struct` is kept as it stands; the limits in its types are those of what is read.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import IO, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from sirtaki.errors import RegistryError
from sirtaki.measures import Gain, LinkModel, told_gain

from .checked import Count, Label, Number, Positive, Text, Texts, checked, parsed, plain
from .graph import GraphJson, ModelGraph, canonical_json, digest, fingerprint, graph_to_json

# ── the cluster: which ranks share a host and a device, and how fast the links between them are ───────────────────────

# A job describes its cluster once, before anything is known about its model. Host names are dropped on the way in: two
# clusters built alike are the same cluster.

MAX_RANKS = 65_536

Log2 = Annotated[int, Meta(ge=-64, le=64)]
Index = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class LinkClass(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Speed of a link in powers of two, so that noise between two measurements rarely changes it.

    Attributes:
        bandwidth_log2: log2 of bytes a second, rounded; None = unknown.
        latency_log2: log2 of nanoseconds, rounded; None = unknown.
    """

    bandwidth_log2: Log2 | None = None
    latency_log2: Log2 | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything is known of it."""
        return self != _UNKNOWN

    @classmethod
    def of(cls, *, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None) -> LinkClass:
        """The class of a measured or nominal speed.

        Raises:
            RegistryError: a speed is not positive and finite.
        """
        for value in (bandwidth_bytes_per_s, latency_s):
            if value is not None and not (0 < value < math.inf):
                raise RegistryError(f"bandwidth and latency must be positive and finite, not {value}")
        return cls(
            bandwidth_log2=None if bandwidth_bytes_per_s is None else round(math.log2(bandwidth_bytes_per_s)),
            latency_log2=None if latency_s is None else round(math.log2(latency_s * 1e9)),
        )

    def octaves_from(self, other: LinkClass) -> int:
        """Doublings of bandwidth and latency that lie between two links; what is unknown of either counts nothing."""
        pairs = ((self.bandwidth_log2, other.bandwidth_log2), (self.latency_log2, other.latency_log2))
        return sum(abs(mine - theirs) for mine, theirs in pairs if mine is not None and theirs is not None)

    def __str__(self) -> str:
        bandwidth = "?" if self.bandwidth_log2 is None else f"2^{self.bandwidth_log2} B/s"
        latency = "?" if self.latency_log2 is None else f"2^{self.latency_log2} ns"
        return f"{bandwidth}, {latency}"


_UNKNOWN = LinkClass()


class Place(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one rank runs.

    Attributes:
        host: number of its host, from 0 in the order in which hosts appear.
        device: kind of its device, such as "cpu" or "NVIDIA H100".
        device_index: which one on that host; ranks with equal numbers share it. None = not shared.
    """

    host: int
    device: Label
    device_index: Index | None


class ClusterShape(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A cluster without its ranks: what is needed to compare it with thousands of others.

    Attributes:
        hosts: what a host is like, its number of ranks, and how many such hosts there are; sorted.
        network: class of the link between hosts.
    """

    hosts: tuple[tuple[str, Ranks, Ranks], ...]
    network: str

    def describe(self) -> str:
        """Its hosts in words: `2 × c5.xlarge, 4 cores`."""
        kinds: Counter[str] = Counter()
        for detail, _, count in self.hosts:
            try:
                (kind, *_), _ = json.JSONDecoder().raw_decode(detail)  # as `Topology.shape` has written it
            except ValueError:
                kind = ""
            kinds[str(kind)] += count
        return "; ".join(f"{count} × {kind or 'unknown kind'}" for kind, count in kinds.items())


class Topology(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks grouped by host and device.

    Attributes:
        places: `(world_size,)`, by rank.
        host_kinds: kind of each host, such as an instance type, `(n_hosts,)`; empty texts where unknown.
        local_link: between ranks of one host.
        network_link: between hosts.

    Raises:
        RegistryError: no ranks, too many, or host numbers that do not match `host_kinds`.
    """

    places: tuple[Place, ...]
    host_kinds: tuple[Label, ...]
    local_link: LinkClass
    network_link: LinkClass

    def __post_init__(self) -> None:
        if not 1 <= len(self.places) <= MAX_RANKS:
            raise RegistryError(f"a topology has 1 to {MAX_RANKS} ranks, not {len(self.places)}")
        if {place.host for place in self.places} != set(range(len(self.host_kinds))):
            raise RegistryError(f"hosts must be numbered from 0 to {len(self.host_kinds) - 1} and each have a rank")

    @classmethod
    def from_ranks(
        cls,
        host_names: Sequence[str],
        *,
        devices: Sequence[str] | None = None,
        host_kinds: Mapping[str, str] | None = None,
    ) -> Topology:
        """The topology of ranks on named hosts; all sequences are `(world_size,)`, by rank. Names are not kept."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(host_names))}
        devices = devices or ["cpu"] * len(host_names)
        return cls(
            places=tuple(Place(numbers[name], device, None) for name, device in zip(host_names, devices, strict=True)),
            host_kinds=tuple((host_kinds or {}).get(name, "") for name in numbers),
            local_link=_UNKNOWN,
            network_link=_UNKNOWN,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def n_hosts(self) -> int:
        """Number of hosts."""
        return len(self.host_kinds)

    def _hosts(self) -> list[str]:
        """One text a host: its kind, and how many ranks share each of its devices."""
        devices: list[Counter[tuple[str, int]]] = [Counter() for _ in self.host_kinds]
        for rank, place in enumerate(self.places):
            alone = -1 - rank  # a device of its own
            index = alone if place.device_index is None else place.device_index
            devices[place.host][(place.device, index)] += 1
        texts = []
        for kind, counted in zip(self.host_kinds, devices, strict=True):
            shares = Counter((device, ranks) for (device, _), ranks in counted.items())
            texts.append(canonical_json([kind, sorted([*share, count] for share, count in shares.items())]))
        return texts

    def fingerprint(self) -> str:
        """A digest of grouping, kinds and classes; host names, their order and that of ranks do not count."""
        return digest(str(self.local_link), str(self.network_link), *sorted(self._hosts()))[:32]

    def shape(self) -> ClusterShape:
        """Hosts of a kind taken together."""
        ranks = Counter(place.host for place in self.places)
        hosts = Counter((f"{text} {self.local_link}", ranks[index]) for index, text in enumerate(self._hosts()))
        return ClusterShape(
            hosts=tuple(sorted((detail, size, count) for (detail, size), count in hosts.items())),
            network=str(self.network_link),
        )

    def describe(self) -> str:
        """The cluster in a few words: `8 ranks on 2 hosts`."""
        ranks = f"{self.world_size} rank" + ("" if self.world_size == 1 else "s")
        return f"{ranks} on {self.n_hosts} host" + ("" if self.n_hosts == 1 else "s")


# ── what a job has found ──────────────────────────────────────────────────────────────────────────────────────────────

# An entry that a newer one cannot beat still gives way to it after this time: networks and drivers change.
STALE_AFTER_S = 90 * 24 * 3600.0

# No setting is that much faster than the untuned default: such an entry comes from a hiccup, or from a stranger.
MAX_SPEEDUP = 100.0

# By so much another host's clock may be ahead.
MAX_AHEAD_S = 24 * 3600.0


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be equal for what a job has kept to be looked at."""

    kind: ClassVar[str]

    def digest(self) -> str:
        """A digest that is equal exactly for equal keys of a kind."""
        return digest(self.kind, canonical_json(plain(self)))[:32]


class EntryKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What must be equal for a job's settings to be used as they are.

    What is empty of the last three is not kept, so that entries of releases that did not know them keep their ids.

    Attributes:
        model: fingerprint of the model graph.
        topology: fingerprint of the topology.
        world_size: number of ranks.
        dtype: name of the element type as it travels.
        device: "cpu" or "cuda".
        versions: library versions that matter, by name.
        gradients: `graph.gradients_fingerprint` of the gradients that are reduced.
        fixed: knobs that the user has fixed, and their values.
        condition: how long communication took against the job's usual, such as "4×", if it had changed in mid-job;
            empty = as usual. Jobs look up what is usual; the others are proposals to them, like those of similar jobs.
    """

    kind = "key"

    model: Text
    topology: Text
    world_size: Ranks
    dtype: Text
    device: Text
    versions: Texts
    gradients: Text = ""
    fixed: Texts = {}
    condition: Text = ""


def make_key(
    model: ModelGraph,
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
        model=fingerprint(model),
        topology=topology.fingerprint(),
        world_size=topology.world_size,
        dtype=dtype,
        device=device,
        versions=dict(versions or {}),
        gradients=gradients,
        fixed=dict(fixed or {}),
    )


class Provenance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an entry comes from.

    Attributes:
        created_s: seconds since the epoch.
        model_name: class name of the model, for people; empty if unknown.
        host_kinds: kinds of the hosts, each once, sorted.
        versions: versions of everything that took part, by name; more than the key's.
    """

    created_s: Annotated[float, Meta(ge=0, le=1e11)]
    model_name: Text = ""
    host_kinds: Annotated[tuple[Text, ...], Meta(max_length=MAX_RANKS)] = ()
    versions: Texts = {}


Threads = Annotated[int, Meta(ge=1, le=2**20)] | None


class _Cut(Struct, array_like=True, forbid_unknown_fields=True):
    stop: Annotated[int, Meta(ge=1, le=2**48)]
    stream: Annotated[int, Meta(ge=0)]
    threads: Threads


class _Lossy(Struct, forbid_unknown_fields=True, omit_defaults=True):
    large: Text = ""
    embeddings: Text = ""
    small: Text = ""


_Way = Literal["ring/ll", "ring/ll128", "ring/simple", "tree/ll", "tree/ll128", "tree/simple"]


class _NcclWays(Struct, forbid_unknown_fields=True, omit_defaults=True):
    small: _Way | None = None
    large: _Way | None = None


class _Knobs(Struct, forbid_unknown_fields=True):
    """As `Knobs.to_json` gives them."""

    unit_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    streams: Annotated[int, Meta(ge=1, le=1024)]
    threads: Threads
    algorithm: Literal["flat", "hierarchical"]
    transport: Literal["shared_memory", "gloo", "mpi", "nccl", "staged"]
    cuts: Annotated[list[_Cut], Meta(max_length=100_000)] | None
    lossy: _Lossy | msgspec.UnsetType = msgspec.UNSET
    nccl: _NcclWays | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        cuts = self.cuts or []
        if any(cut.stream >= self.streams for cut in cuts):
            raise ValueError(f"a cut's stream is none of {self.streams}")
        if any(cut.stop >= following.stop for cut, following in pairwise(cuts)):
            raise ValueError("cuts must ascend")


class _Trial(Struct, forbid_unknown_fields=True):
    arm: Text
    knobs: _Knobs
    iterations: Count
    span_s: Number | None
    noise_s: Number
    status: Literal["complete", "pruned", "failed"]
    was_best: bool


_Rate = Annotated[float, Meta(ge=1e-9, le=1e18)]


class _Link(Struct, forbid_unknown_fields=True):
    """A `LinkModel`; how busy its hosts are is theirs, and earlier releases refuse fields they do not know."""

    alpha_s: Number
    throughput: Annotated[tuple[_Rate, ...], Meta(min_length=1, max_length=1024)]
    host_s: Number
    residual: Number

    def model(self) -> LinkModel:
        return LinkModel(**msgspec.structs.asdict(self))


class _OldLink(Struct, forbid_unknown_fields=True):
    """As older releases wrote it: the concurrency curve as factors."""

    latency_s: Number
    bandwidth_bytes_per_s: _Rate
    concurrency: Annotated[list[_Rate], Meta(max_length=1024)]

    def model(self) -> LinkModel:
        rates = (self.bandwidth_bytes_per_s * gain for gain in self.concurrency or [1.0])
        return LinkModel(alpha_s=self.latency_s, throughput=tuple(min(max(rate, 1e-9), 1e18) for rate in rates))


class _Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """What is kept of an entry, but for the two graphs, which a store keeps once for all entries that share them."""

    key: EntryKey
    layout: Text
    knobs: _Knobs
    best_span_s: Positive
    default_span_s: Positive
    noise_s: Number
    n_trials: Count
    arm: Text
    complete: bool
    trials: Annotated[list[_Trial], Meta(max_length=10_000)]
    link: dict[str, Any] | None
    provenance: Provenance
    gain: Gain | None = None

    def entry(self, model: ModelGraph, topology: Topology) -> Entry:
        fields = msgspec.structs.asdict(self)
        fields |= {"model": model, "topology": topology, "knobs": plain(self.knobs)}
        if self.link is not None:
            old = "latency_s" in self.link
            link = checked(_OldLink, self.link, at="link") if old else checked(_Link, self.link, at="link")
            fields["link"] = link.model()
        return Entry(**{**fields, "trials": tuple(plain(self.trials))})


class _Whole(_Body):
    model: GraphJson
    topology: Topology


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The winner of one job's warm-up.

    Attributes:
        key: where it is found again.
        model: the model's graph; its fingerprint is `key.model`, by which entries are compared.
        topology: the cluster; its fingerprint is `key.topology`.
        layout: `layout_fingerprint` of the gradient layout that explicit cuts fit, empty if unknown.
        knobs: the best knobs, as `Knobs.to_json` gives them.
        best_span_s: their span.
        default_span_s: the untuned default's span in the same job.
        noise_s: noise of these spans.
        gain: that paired turns with the default have proved; None where the default was kept, of jobs that ended
            early, and in entries of releases that proved nothing.
        n_trials: trials that ran, those of cut-short jobs before included.
        arm: the arm that proposed the best knobs.
        complete: False if the job ended before its warm-up; the next job goes on from `trials`.
        trials: finished trials as JSON: arm, knobs, iterations, span_s (null where it failed), noise_s, status,
            was_best. May be empty.
        link: the link as measured, if it was.
        provenance: where it comes from.
    """

    key: EntryKey
    model: ModelGraph = field(compare=False)
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
    provenance: Provenance = field(default_factory=lambda: Provenance(created_s=time.time()))
    gain: Gain | None = None

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
        """A JSON-ready dict; `entry_from_json` is its inverse."""
        return {**self.body(), "model": graph_to_json(self.model), "topology": plain(self.topology)}

    def body(self) -> dict[str, Any]:
        """The same without the two graphs; `entry_from_body` is its inverse."""
        body: dict[str, Any] = {name: plain(getattr(self, name)) for name in _Body.__struct_fields__}
        if body["link"] is not None:
            body["link"] = {name: body["link"][name] for name in _Link.__struct_fields__}
        if body["gain"] is None:
            del body["gain"]  # which earlier releases do not know
        return body

    def describe_gain(self) -> str:
        """How much faster than the default, with the interval of what was proved, and whether anything was."""
        return told_gain(self.gain, self.default_span_s, self.best_span_s)

    def describe(self) -> str:
        """The job in a few words: `ResNet on 8 ranks on 2 hosts`."""
        name = self.provenance.model_name or f"model {self.key.model[:8]}"
        return f"{name} on {self.topology.describe()}"


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


def entry_from_json(data: object) -> Entry:
    """The entry that `Entry.to_json` described.

    Raises:
        RegistryError: a field is missing, unknown or has an invalid value, or no job can have found this;
            the message names it.
    """
    whole = checked(_Whole, data)
    entry = whole.entry(whole.model.graph(), whole.topology)
    if fingerprint(entry.model) != entry.key.model:
        raise RegistryError("key.model: is not the fingerprint of the model's graph")
    if entry.topology.fingerprint() != entry.key.topology:
        raise RegistryError("key.topology: is not the fingerprint of the topology")
    if entry.topology.world_size != entry.key.world_size:
        raise RegistryError(f"key.world_size: {entry.key.world_size}, but the topology has {entry.topology.world_size}")
    if why := implausible(entry):
        raise RegistryError(why)
    return entry


def entry_from_body(text: str, *, model: ModelGraph, topology: Topology) -> Entry:
    """The entry that the JSON of `Entry.body` described, of this model and topology; RegistryError if it is damaged."""
    return parsed(_Body, text).entry(model, topology)


LIKE = 1.25
"""Rows are touched alike where numbers of them differ by this factor at most."""

LIKE_COVERAGE = 0.1
"""And parts of all touches by this at most: so much may hot rows lose until they are ranked anew."""

HOT_COLD, BLOCKS = "hot_cold", "blocks"

_Rows = Annotated[int, Meta(ge=1, le=2**48)]
_Touches = Annotated[float, Meta(ge=1, le=1e18)]


class Skew(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows of one parameter are touched.

    Attributes:
        touched: in an iteration by all ranks together, one that several ranks touch counted for each; mean.
        union: by any rank, mean.
        curve: which part of all touches the most touched rows have: `(rows, part)`, both ascending, from one row on.

    Raises:
        RegistryError: there is no curve, or it does not ascend.
    """

    touched: _Touches
    union: _Touches
    curve: Annotated[tuple[tuple[_Rows, Annotated[float, Meta(ge=0, le=1)]], ...], Meta(max_length=1000)]

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


class Way(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How something travelled fastest of all that a job has tried; of two of one id the newer is kept.

    Attributes:
        key: where it is found again.
        created_s: seconds since the epoch.
    """

    tag: ClassVar[str]
    called: ClassVar[str]
    """For people."""
    listed: ClassVar[str]
    """Where they are kept: the table, and the list in a document."""
    shown_by: ClassVar[str]
    """The command that lists them."""

    key: Key
    created_s: Number

    @property
    def id(self) -> str:
        """One is kept for each."""
        return digest(self.tag, self.key.digest(), *self._one_for_each())[:32]

    def _one_for_each(self) -> tuple[str, ...]:
        """What tells ways of one key apart."""
        raise NotImplementedError

    def misfit(self) -> str:
        """What no job can have found, in words; empty if there is nothing of the kind."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `way_from_json` is its inverse."""
        data: dict[str, Any] = plain(self)
        return data


AnyWay = TypeVar("AnyWay", bound=Way)


def way_from_json(kind: type[AnyWay], data: object) -> AnyWay:
    """The way that `Way.to_json` described.

    Raises:
        RegistryError: a field is missing, unknown or has an invalid value, or no job can have found this;
            the message names it.
    """
    way = checked(kind, data)
    if way.created_s > time.time() + MAX_AHEAD_S:
        raise RegistryError(f"created_s: {way.created_s:.0f} is in the future")
    if why := way.misfit():
        raise RegistryError(why)
    return way


class RowsKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be equal for a way to be looked at.

    Attributes:
        topology: fingerprint of the topology.
        ranks: that add up rows.
        n_rows: of the parameter.
        row_bytes: of one.
        dtype: name of the element type.
        aggregator: one is there that may sum hot rows.
        versions: library versions that matter, by name.
        fixed: knobs that the user has fixed, and their values.
    """

    kind = "rows"

    topology: Text
    ranks: Ranks
    n_rows: _Rows
    row_bytes: Annotated[int, Meta(ge=0, le=2**48)]
    dtype: Text
    aggregator: bool = False
    versions: Texts = {}
    fixed: Texts = {}


class RowWay(Way, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way of one parameter's rows that was the fastest of those that a job tried; a plan without its hot rows.

    Attributes:
        key: where it is found again.
        name: of the parameter.
        skew: how its rows were touched.
        path: the way.
        cold: that of rows that are not hot.
        block_rows: consecutive rows in a block.
        n_hot: how many rows were hot.
        span_s: how long a reduction took, the median of trials.
        aggregated: an aggregator summed the hot rows.
    """

    tag, called, listed, shown_by = "row way", "way of rows", "row_ways", "`sirtaki registry rows`"

    key: RowsKey
    name: Text
    skew: Skew
    path: Annotated[str, Meta(pattern=r"^(gather|owner|hot_cold|blocks|dense)\Z")]
    cold: Annotated[str, Meta(pattern=r"^(gather|owner)\Z")]
    block_rows: _Rows
    n_hot: Annotated[int, Meta(ge=0)]
    span_s: Number
    aggregated: bool = False

    def _one_for_each(self) -> tuple[str, ...]:
        return self.name, canonical_json(self.skew.bucket())

    def misfit(self) -> str:  # noqa: D102
        hot, n_rows = self.path == HOT_COLD, self.key.n_rows
        if self.aggregated and not (hot and self.key.aggregator):
            return f"aggregated: only of {HOT_COLD} where the key has an aggregator"
        if not int(hot) <= self.n_hot <= (n_rows if hot else 0):
            return f"n_hot: {self.n_hot} of {n_rows} rows cannot be hot where the path is {self.path}"
        if max(self.skew.union, self.skew.curve[-1][0]) > n_rows:
            return f"skew: more rows are touched than the {n_rows} that there are"
        return ""


def nearest_way(found: Iterable[RowWay], skew: Skew, *, name: str) -> RowWay | None:
    """Of parameters whose rows are touched like that, and not too old: of this name first, else the nearest."""
    since_s = time.time() - STALE_AFTER_S
    alike = [
        (way.name != name, distance, way)
        for way in found
        if way.created_s >= since_s and (distance := way.skew.distance(skew)) <= 1.0
    ]
    return min(alike, key=lambda ranked: ranked[:2])[2] if alike else None


class ShardsKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be equal for a setting of sharded training to be looked at.

    Attributes:
        topology: fingerprint of the topology.
        ranks: that have the shards of one model.
        model: digest of its sharded modules, in the order in which they are used.
        transport: what carries them.
        versions: library versions that matter, by name.
        fixed: knobs that the user has fixed, and their values.
    """

    kind = "shards"

    topology: Text
    ranks: Ranks
    model: Text
    transport: Text
    versions: Texts = {}
    fixed: Texts = {}


_Modules = Annotated[int, Meta(ge=0, le=2**20)]
_Places = tuple[Annotated[int, Meta(ge=0, lt=2**20)], ...]


class ShardWay(Way, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the shards of one model travelled fastest, of what a job tried.

    Attributes:
        key: where it is found again.
        memory_bytes: that the job allowed, above what untuned training takes.
        modules: how many are sharded.
        streams: as the next three, and `scattering`, as `autotune.sharded.ShardKnobs` has them.
        gain: over the untuned setting, as a share of its step; 0 where that was kept.
        near: modules whose parameters each node keeps, as there; `joined` likewise.
        gathers: as the next one as `autotune.sharded.ShardKnobs` has it: a compressor that the key names.
    """

    tag, called, listed = "shard way", "setting of sharded training", "shard_ways"
    shown_by = "`sirtaki registry shards`"

    key: ShardsKey
    memory_bytes: Annotated[int, Meta(ge=0, le=2**62)]
    modules: _Modules
    streams: Annotated[int, Meta(ge=1, le=1024)]
    ahead: _Modules
    behind: _Modules
    kept: _Places
    gain: Annotated[float, Meta(ge=0, le=1)]
    near: _Places = ()
    gathers: Text = ""
    scatters: Text = ""
    scattering: Annotated[int, Meta(ge=1, le=1024)] = 1
    joined: _Places = ()

    def _one_for_each(self) -> tuple[str, ...]:
        return (str(self.memory_bytes),)

    def misfit(self) -> str:  # noqa: D102
        most, allowed = max(1, self.modules), self.key.fixed.get("lossy", "")
        if not {self.gathers, self.scatters} <= {"", *allowed.split(",")}:
            return f"packed by {self.gathers or 'none'} and {self.scatters or 'none'} of {allowed or 'no'} compressors"
        kept = [*self.kept, *self.near]
        if len(set(kept)) < len(kept) or any(place >= self.modules for place in kept):
            return f"kept: modules {self.kept} and {self.near} of {self.modules}"
        if list(self.joined) != sorted({*self.joined} & {*range(1, self.modules)}):
            return f"joined: modules {self.joined} of {self.modules}"
        wrong = (name for name in ("ahead", "behind") if getattr(self, name) > most)
        return next((f"{name}: {getattr(self, name)} of {self.modules} modules" for name in wrong), "")


WAYS: tuple[type[Way], ...] = (RowWay, ShardWay)

FORMAT = "sirtaki-registry"
VERSION = 4
_LISTS = {  # of documents of a version
    1: ("entries",),
    2: ("entries", "row_ways"),
    3: ("entries", "row_ways"),
    VERSION: ("entries", "row_ways", "shard_ways"),
}

MAX_FILE_CHARS = 1 << 29
MAX_ENTRIES = 100_000


def write_document(entries: Iterable[Entry], ways: Iterable[Way], file: IO[str]) -> int:
    """Writes a document with one entry, way of rows or setting of sharded training a line; how many there were."""
    ways = list(ways)
    lists: dict[str, Iterable[Entry | Way]] = {"entries": entries}
    lists |= {kind.listed: [way for way in ways if isinstance(way, kind)] for kind in WAYS}
    file.write(f'{{"format": "{FORMAT}", "version": {VERSION}')
    n_written = 0
    for name, items in lists.items():
        file.write(f', "{name}": [')
        for number, item in enumerate(items):
            file.write(",\n" if number else "\n")
            file.write(json.dumps(item.to_json(), allow_nan=False))
            n_written += 1
        file.write("\n]")
    file.write("}\n")
    return n_written


def read_document(file: IO[str]) -> tuple[list[Entry], list[Way]]:
    """The entries, ways of rows and settings of sharded training of a document, all of them checked.

    Documents of version 1 have entries only, those up to version 3 no settings of sharded training.

    Raises:
        RegistryError: it is no such document, or one of them has a field that is invalid; the message names both.
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
        raise RegistryError(f"the document's version is not 1 to {VERSION}: it was written by a newer release")
    lists = _LISTS[data["version"]]
    if set(data) != {"format", "version", *lists}:
        raise RegistryError(f"the document needs exactly the fields format, version and {' and '.join(lists)}")
    for name in lists:
        if not isinstance(data[name], list) or len(data[name]) > MAX_ENTRIES:
            raise RegistryError(f"{name} must be a list of at most {MAX_ENTRIES}")
    ways = [_each(kind.called, data.get(kind.listed, []), partial(way_from_json, kind)) for kind in WAYS]
    return _each("entry", data["entries"], entry_from_json), list(chain.from_iterable(ways))


_T = TypeVar("_T")


def _each(what: str, data: list[object], read: Callable[[object], _T]) -> list[_T]:
    found = []
    for number, item in enumerate(data, start=1):
        try:
            found.append(read(item))
        except RegistryError as err:
            raise RegistryError(f"{what} {number}: {err}") from err
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number here")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a field is there twice")
    return data
