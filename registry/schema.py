"""Records: what the registry keeps of a job, of sparse rows and of sharded training.

A record holds the classes that run, such as `Knobs`. The limits in their types are checked when a record is read. JSON
is the form on disk; a record that was written by an earlier release is converted in `from_json`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta, Struct

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.sharded import ShardKnobs
from sirtaki.autotune.trial import Trial
from sirtaki.comm.sparse.plan import COLD_PATHS, SparsePath
from sirtaki.errors import RegistryError
from sirtaki.fields import Count, Number, Positive, Text, Texts, checked, plain
from sirtaki.measures import Gain, LinkModel, describe_gain

from .cluster import MAX_RANKS, Ranks, Topology
from .graph import GraphJson, ModelGraph, canonical_json, digest, fingerprint, graph_to_json

STALE_AFTER_S = 90 * 24 * 3600.0
"""Age in seconds from which a newer record replaces a better one, because networks and drivers change."""

MAX_SPEEDUP = 100.0
"""No setting is that much faster than the untuned default. Such a record is a measurement error or a forgery."""

MAX_AHEAD_S = 24 * 3600.0
"""Seconds by which the clock of another host may be ahead."""


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties that must be equal for a stored setting to be considered."""

    kind: ClassVar[str]

    def digest(self) -> str:
        """Return a digest that is equal exactly for equal keys of a kind."""
        return digest(self.kind, canonical_json(plain(self)))[:32]


class StoredSetting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record: a setting that a job found fastest, the key under which it is found again, and its origin."""

    table: ClassVar[str]
    """Name of the table in a database, and of the list in a document."""
    called: ClassVar[str]
    """Name in messages."""
    shown_by: ClassVar[str]
    """Command that lists the records."""

    key: Key

    @property
    def created_s(self) -> float:
        """Seconds since the epoch."""
        raise NotImplementedError

    @property
    def id(self) -> str:
        """Id of the record. The store keeps one record for each."""
        return digest(*self._identity())[:32]

    def _identity(self) -> tuple[str, ...]:
        raise NotImplementedError

    def supersedes(self, old: Any) -> bool:  # Any: a record of the same type
        """Return whether this record replaces a stored one with the same id."""
        return bool(self.created_s > old.created_s)

    def distance(self, wanted: Any) -> float:  # Any: each type has its own
        """Return how far this record is from what a job with the same key wants; infinite = of no use."""
        return 0.0

    def implausible(self) -> str:
        """Return why no job can have found this, in words; empty if a job can have."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; `from_json` is the inverse."""
        data: dict[str, Any] = plain(self)
        return data

    def body(self) -> dict[str, Any]:
        """Return what a store keeps in the row of this record: `to_json` without the graphs."""
        return self.to_json()

    @property
    def graphs(self) -> dict[str, Any]:
        """Fields of `to_json` that are not in `body`, as objects."""
        return {}

    @classmethod
    def from_json(cls, data: object, graphs: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Return the record that `to_json` of this or an earlier release described.

        Args:
            data: what `to_json` returned, or `body` if `graphs` are given.
            graphs: fields that are not in `data`; see `graphs`.

        Raises:
            RegistryError: a field is missing, unknown or invalid, or no job can have found this; the message names it.
        """
        record = checked(cls, {**checked(dict[str, Any], data), **graphs} if graphs else data)
        if record.created_s > time.time() + MAX_AHEAD_S:
            raise RegistryError(f"created_s: {record.created_s:.0f} is in the future")
        if why := record.implausible():
            raise RegistryError(why)
        return record


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class EntryKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Properties that must be equal for a job's setting to be used as it is.

    The last three are left out if they are empty, so that entries of releases that did not know them keep their ids.

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
    """Origin of an entry.

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


class _OldLink(Struct, forbid_unknown_fields=True):
    """A link as early versions wrote it: the concurrency curve as factors."""

    latency_s: Number
    bandwidth_bytes_per_s: Positive
    concurrency: Annotated[list[Positive], Meta(max_length=1024)]

    def model(self) -> LinkModel:
        rates = (self.bandwidth_bytes_per_s * gain for gain in self.concurrency or [1.0])
        return LinkModel(alpha_s=self.latency_s, throughput=tuple(min(max(rate, 1e-9), 1e18) for rate in rates))


class JobRecord(StoredSetting, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """Result of one job's warm-up.

    Attributes:
        key: under which it is found again.
        model: graph of the model; its fingerprint is `key.model`. Records are compared by it.
        topology: the cluster; its fingerprint is `key.topology`.
        layout: `layout_fingerprint` of the gradient layout that explicit cuts fit; empty if unknown.
        knobs: the best knobs.
        best_span_s: their span.
        default_span_s: span of the untuned default in the same job.
        noise_s: noise of these spans.
        gain: gain over the default that a paired comparison has proved. None if the default was kept, of jobs that
            ended early, and of releases that proved nothing.
        n_trials: number of trials, including those of earlier jobs that were cut short.
        arm: arm that proposed the best knobs.
        complete: False if the job ended before its warm-up; the next job continues from `trials`.
        trials: finished trials; may be empty.
        link: the link as measured, if it was.
        provenance: origin.
    """

    table, called, shown_by = "entries", "entry", "`sirtaki registry list`"

    key: EntryKey
    model: ModelGraph
    topology: Topology
    knobs: Knobs
    best_span_s: Positive
    default_span_s: Positive
    noise_s: Number = 0.0
    n_trials: Count = 0
    arm: Text = ""
    complete: bool = True
    layout: Text = ""
    trials: Annotated[tuple[Trial[Knobs], ...], Meta(max_length=10_000)] = ()
    link: LinkModel | None = None
    provenance: Provenance
    gain: Gain | None = None

    def __eq__(self, other: object) -> bool:
        """Compare everything but the graph, whose fingerprint is in the key."""
        names = [name for name in self.__struct_fields__ if name != "model"]
        return type(other) is JobRecord and all(getattr(self, name) == getattr(other, name) for name in names)

    def __ne__(self, other: object) -> bool:
        return not self == other  # Struct's own compares identities

    __hash__ = None  # type: ignore[assignment]  # its key holds dicts

    @property
    def created_s(self) -> float:  # noqa: D102
        return self.provenance.created_s

    @property
    def id(self) -> str:
        """Digest of the key. Its first characters suffice for people."""
        return self.key.digest()

    @property
    def speedup(self) -> float:
        """Speed relative to the untuned default. Comparable between jobs, because both times are of one job."""
        return self.default_span_s / self.best_span_s

    @property
    def relative_noise(self) -> float:
        """Noise as a fraction of the best span."""
        return self.noise_s / self.best_span_s

    def supersedes(self, old: JobRecord) -> bool:
        """Return whether this record replaces a stored one with the same key.

        A complete record replaces an incomplete one, never the other way. Of two incomplete ones the longer search wins
        (a job that continues has the trials of the earlier job). Of two with the same knobs the newer one knows better
        what they are worth. Otherwise the better one wins if it is better by more than the noise, else the newer; after
        `STALE_AFTER_S` always the newer. A job that has run a stored setting and found it slow says so to
        `Store.put`.
        """
        if self.complete != old.complete:
            return self.complete
        if not self.complete and self.n_trials != old.n_trials:
            return self.n_trials > old.n_trials
        age_s = self.created_s - old.created_s
        if abs(age_s) > STALE_AFTER_S or self.knobs == old.knobs:
            return age_s >= 0
        noise = 1 + self.relative_noise + old.relative_noise
        if self.speedup > old.speedup * noise or old.speedup > self.speedup * noise:
            return self.speedup > old.speedup
        return age_s >= 0

    def implausible(self) -> str:  # noqa: D102
        if 1 / MAX_SPEEDUP <= self.speedup <= MAX_SPEEDUP:
            return ""
        return f"best_span_s: {self.speedup:.3g} times as fast as default_span_s is more than tuning can gain or lose"

    def to_json(self) -> dict[str, Any]:  # noqa: D102
        return {**self.body(), "model": graph_to_json(self.model), "topology": plain(self.topology)}

    @property
    def graphs(self) -> dict[str, Any]:  # noqa: D102
        return {"model": self.model, "topology": self.topology}

    def body(self) -> dict[str, Any]:  # noqa: D102
        names = (name for name in self.__struct_fields__ if name not in ("model", "topology"))
        body: dict[str, Any] = {name: plain(getattr(self, name)) for name in names}
        if body["link"] is not None:
            del body["link"]["busy"]  # earlier releases refuse it; it is a property of the hosts
        if body["gain"] is None:
            del body["gain"]  # which earlier releases do not know
        return body

    @classmethod
    def from_json(cls, data: object, graphs: Mapping[str, Any] = MappingProxyType({})) -> Self:  # noqa: D102
        data = checked(dict[str, Any], data)
        if "model" in data:
            data["model"] = checked(GraphJson, data["model"], at="model").graph()
        if isinstance(link := data.get("link"), dict) and "latency_s" in link:
            data["link"] = checked(_OldLink, link, at="link").model()
        if isinstance(trials := data.get("trials"), list):  # JSON knows no infinity
            failed = {"span_s": math.inf}
            data["trials"] = [
                one | failed if isinstance(one, dict) and one.get("span_s", 0) is None else one for one in trials
            ]
        return super().from_json(data, graphs)

    def describe_gain(self) -> str:
        """Return how much faster than the default, with the interval of what was proved, and whether anything was."""
        return describe_gain(self.gain, self.default_span_s, self.best_span_s)

    def describe(self) -> str:
        """Return the job in a few words: `ResNet on 8 ranks on 2 hosts`."""
        name = self.provenance.model_name or f"model {self.key.model[:8]}"
        return f"{name} on {self.topology.describe()}"


# ── rows of sparse gradients ─────────────────────────────────────────────────────────────────────────────────────────


LIKE = 1.25
"""Rows are touched alike where numbers of them differ by this factor at most."""

LIKE_COVERAGE = 0.1
"""And parts of all touches by this at most: so much may hot rows lose until they are ranked anew."""

_Rows = Annotated[int, Meta(ge=1, le=2**48)]
_Touches = Annotated[float, Meta(ge=1, le=1e18)]


class Skew(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Access pattern of the rows of one parameter.

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


class RowsKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties that must be equal for a sparse algorithm to be considered.

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


class RowsRecord(StoredSetting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fastest algorithm that a job found for the rows of one parameter: a `SparsePlan` without its hot rows.

    Attributes:
        key: under which it is found again.
        name: of the parameter.
        skew: how often its rows are accessed.
        path: the algorithm.
        cold: algorithm of the rows that are not hot.
        block_rows: consecutive rows in a block.
        n_hot: number of hot rows.
        span_s: time of a reduction, the median of trials.
        aggregated: an aggregator summed the hot rows.
        created_s: seconds since the epoch.
    """

    table, called, shown_by = "row_ways", "way of rows", "`sirtaki registry rows`"

    key: RowsKey
    name: Text
    skew: Skew
    path: SparsePath
    cold: SparsePath
    block_rows: _Rows
    n_hot: Annotated[int, Meta(ge=0)]
    span_s: Number
    created_s: Number
    aggregated: bool = False

    def _identity(self) -> tuple[str, ...]:
        return "row way", self.key.digest(), self.name, canonical_json(self.skew.bucket())

    def distance(self, wanted: tuple[str, Skew]) -> float:
        """Return the distance from a parameter's name and skew: 0 to 1 for the same name, 1 to 2 for another one."""
        name, skew = wanted
        apart = self.skew.distance(skew)
        stale = self.created_s < time.time() - STALE_AFTER_S
        return math.inf if stale or apart > 1.0 else apart + float(self.name != name)

    def implausible(self) -> str:  # noqa: D102
        hot, n_rows = self.path is SparsePath.HOT_COLD, self.key.n_rows
        if self.cold not in COLD_PATHS:
            return f"cold: cold rows do not travel by {self.cold.value}"
        if self.aggregated and not (hot and self.key.aggregator):
            return f"aggregated: only of {SparsePath.HOT_COLD.value} where the key has an aggregator"
        if not int(hot) <= self.n_hot <= (n_rows if hot else 0):
            return f"n_hot: {self.n_hot} of {n_rows} rows cannot be hot where the path is {self.path.value}"
        if max(self.skew.union, self.skew.curve[-1][0]) > n_rows:
            return f"skew: more rows are touched than the {n_rows} that there are"
        return ""


# ── sharded training ─────────────────────────────────────────────────────────────────────────────────────────────────


class ShardsKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties that must be equal for a setting of sharded training to be considered.

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


class ShardsRecord(StoredSetting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fastest setting that a job found for a model with sharded parameters. JSON has its fields beside the others.

    Attributes:
        key: under which it is found again.
        memory_bytes: memory that the job allowed above what untuned training takes.
        modules: number of sharded modules.
        setting: the setting; its compressors are among those that the key names.
        gain: share of the untuned step that it saves; 0 if the untuned setting was kept.
        created_s: seconds since the epoch.
    """

    table, called, shown_by = "shard_ways", "setting of sharded training", "`sirtaki registry shards`"

    key: ShardsKey
    memory_bytes: Annotated[int, Meta(ge=0, le=2**62)]
    modules: Annotated[int, Meta(ge=0, le=2**20)]
    setting: ShardKnobs
    gain: Annotated[float, Meta(ge=0, le=1)]
    created_s: Number

    def _identity(self) -> tuple[str, ...]:
        return "shard way", self.key.digest(), str(self.memory_bytes)

    def distance(self, wanted: int) -> float:
        """Return by how much the memory that was allowed exceeds that many bytes; infinite if it was less."""
        stale = self.created_s < time.time() - STALE_AFTER_S
        return math.inf if stale or self.memory_bytes < wanted else float(self.memory_bytes - wanted)

    def implausible(self) -> str:  # noqa: D102
        knobs, most, allowed = self.setting, max(1, self.modules), self.key.fixed.get("lossy", "")
        if not {knobs.gathers, knobs.scatters} <= {"", *allowed.split(",")}:
            return (
                f"packed by {knobs.gathers or 'none'} and {knobs.scatters or 'none'} of {allowed or 'no'} compressors"
            )
        kept = [*knobs.kept, *knobs.near]
        if len(set(kept)) < len(kept) or any(place >= self.modules for place in kept):
            return f"kept: modules {knobs.kept} and {knobs.near} of {self.modules}"
        if list(knobs.joined) != sorted({*knobs.joined} & {*range(1, self.modules)}):
            return f"joined: modules {knobs.joined} of {self.modules}"
        wrong = (name for name in ("ahead", "behind") if getattr(knobs, name) > most)
        return next((f"{name}: {getattr(knobs, name)} of {self.modules} modules" for name in wrong), "")

    def to_json(self) -> dict[str, Any]:  # noqa: D102
        data = super().to_json()
        return {**data.pop("setting"), **data}

    @classmethod
    def from_json(cls, data: object, graphs: Mapping[str, Any] = MappingProxyType({})) -> Self:  # noqa: D102
        data = checked(dict[str, Any], data)
        setting = {one.name: data.pop(one.name) for one in fields(ShardKnobs) if one.name in data}
        return super().from_json({**data, "setting": setting}, graphs)


RECORDS: tuple[type[StoredSetting], ...] = (JobRecord, RowsRecord, ShardsRecord)
