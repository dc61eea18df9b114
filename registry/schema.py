"""Records of the registry: settings of jobs, of sparse rows and of sharded training.

Records contain tuner classes such as `Knobs`. Reading a record also checks the value ranges in the types of these
classes. On disk, records are JSON. `from_json` converts records of earlier releases.
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
from sirtaki.errors import RegistryError, require
from sirtaki.fields import Count, Number, Positive, Text, Texts, checked, plain
from sirtaki.measures import Gain, LinkModel, describe_gain

from .cluster import MAX_RANKS, Ranks, Topology
from .graph import GraphJson, ModelGraph, canonical_json, digest, fingerprint, graph_to_json

STALE_AFTER_S = 90 * 24 * 3600.0
"""Age difference, in seconds, from which a newer record replaces even a faster one: networks and drivers change."""

MAX_SPEEDUP = 100.0
"""Largest accepted speedup over the untuned default. Larger ones are rejected as measurement errors or forgeries."""

MAX_AHEAD_S = 24 * 3600.0
"""Seconds by which a record's time of creation may be ahead of this host's clock."""


def local_time(seconds: float) -> str:
    """Format seconds since the epoch as local time, to the minute: `2026-11-28 23:52`."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of a job by which it finds stored settings: a setting fits the job if both have equal keys."""

    kind: ClassVar[str]

    def digest(self) -> str:
        """Return a digest of the key. Two keys have equal digests only if they are equal and of the same class."""
        return digest(self.kind, canonical_json(plain(self)))[:32]


class StoredSetting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record: the fastest setting of a job, the key by which jobs find the record, and its origin."""

    table: ClassVar[str]
    """Name of the database table, and of the list in a document."""
    called: ClassVar[str]
    """Noun that names this type of record in messages to the user."""
    shown_by: ClassVar[str]
    """Command that lists the records."""

    key: Key

    @property
    def created_s(self) -> float:
        """Return the time of creation, in seconds since the epoch."""
        raise NotImplementedError

    @property
    def id(self) -> str:
        """Return the id. The store keeps one record per id."""
        return digest(*self._identity())[:32]

    @property
    def reference(self) -> str:
        """Return the beginning of the id and the time of creation in words: `entry 98ce2b6d, stored 2026-11-28 23:52`.

        Commands such as `sirtaki registry show` accept the beginning of an id.
        """
        return f"{self.called} {self.id[:8]}, stored {local_time(self.created_s)}"

    def _identity(self) -> tuple[str, ...]:
        raise NotImplementedError

    def supersedes(self, old: Any) -> bool:  # Any, because a subclass accepts only a record of its own type.
        """Return whether this record replaces a stored one with the same id."""
        return bool(self.created_s > old.created_s)

    def distance(self, wanted: Any) -> float:  # Any, because each type of record compares with another type of value.
        """Return how much this record differs from `wanted`, which describes a job with the same key.

        Infinity = unusable.
        """
        return 0.0

    def implausible(self) -> str:
        """Return the reason why no job can have produced this record; "" if it is plausible."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict. `from_json` is the inverse."""
        data: dict[str, Any] = plain(self)
        return data

    def body(self) -> dict[str, Any]:
        """Return the fields of `to_json` that are stored in the record's own row: all but those of `graphs`."""
        return self.to_json()

    @property
    def graphs(self) -> dict[str, Any]:
        """Return the fields that `body` omits: a job's model graph and topology, by name of the field."""
        return {}

    @classmethod
    def from_json(cls, data: object, graphs: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Build a record from the output of `to_json` of this or an earlier release.

        Args:
            data: output of `to_json`, or of `body` if `graphs` is given.
            graphs: objects for the fields that `data` omits, by field.

        Raises:
            RegistryError: a field is missing, unknown or invalid, or the record is implausible. The message names the
                field.
        """
        record = checked(cls, {**checked(dict[str, Any], data), **graphs} if graphs else data)
        latest_s = time.time() + MAX_AHEAD_S
        rule = f"a time before now ({latest_s:.0f}); check the clocks of the hosts"
        require(record.created_s <= latest_s, "created_s", rule, f"{record.created_s:.0f}", RegistryError)
        if why := record.implausible():
            raise RegistryError(why)
        return record


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class EntryKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Properties that must be equal for a job to use a stored setting unchanged.

    Empty values of `gradients`, `fixed` and `condition` are omitted from JSON, so that ids of entries from releases
    without these fields stay valid.

    Attributes:
        model: fingerprint of the model graph.
        topology: fingerprint of the topology.
        world_size: number of ranks.
        dtype: name of the element type on the wire.
        device: "cpu" or "cuda".
        versions: relevant library versions, by name.
        gradients: `graph.gradients_fingerprint` of the reduced gradients.
        fixed: values of the knobs (parameters of a setting) that the user fixed, by name.
        condition: ratio of communication time to its usual value, such as "4×", if it changed during the job; "" =
            usual. Jobs look up the key with the usual condition. Entries with other conditions count as entries of
            similar jobs.
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
    """Return the key of a job. The arguments are described in `EntryKey`."""
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
    """Origin of a job's record: when and where it was measured.

    Attributes:
        created_s: seconds since the epoch.
        model_name: class name of the model, for display; "" = unknown.
        host_kinds: distinct kinds of the job's hosts, sorted.
        versions: versions of all components, by name; a superset of the key's.
    """

    created_s: Annotated[float, Meta(ge=0, le=1e11)]
    model_name: Text = ""
    host_kinds: Annotated[tuple[Text, ...], Meta(max_length=MAX_RANKS)] = ()
    versions: Texts = {}


class _OldLink(Struct, forbid_unknown_fields=True):
    """Measured link as early versions stored it. Its concurrency curve is a list of factors."""

    latency_s: Number
    bandwidth_bytes_per_s: Positive
    concurrency: Annotated[list[Positive], Meta(max_length=1024)]

    def model(self) -> LinkModel:
        rates = (self.bandwidth_bytes_per_s * gain for gain in self.concurrency or [1.0])
        return LinkModel(alpha_s=self.latency_s, throughput=tuple(min(max(rate, 1e-9), 1e18) for rate in rates))


class JobRecord(StoredSetting, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """Result of one job's warm-up.

    Attributes:
        key: properties by which a job finds the record.
        model: graph of the model; its fingerprint is `key.model`.
        topology: cluster of the job; its fingerprint is `key.topology`.
        layout: `layout_fingerprint` of the gradients for which the unit (bucket) boundaries in `knobs` were planned;
            "" = unknown.
        knobs: fastest setting (values of all tuned parameters) that the tuner found.
        best_span_s: communication time per iteration with `knobs`.
        default_span_s: communication time of the untuned default in the same job.
        noise_s: measurement noise of `best_span_s` and `default_span_s`.
        gain: gain over the default, proved by a paired comparison. None if the default was kept, if the job ended
            early, or if an earlier release wrote the record.
        n_trials: number of trials, including trials of earlier unfinished jobs that this job continued.
        arm: arm (search technique of the tuner) that proposed `knobs`.
        complete: False if the job ended before its warm-up did. The next job then continues from `trials`.
        trials: finished trials of the tuner; may be empty.
        link: measured speed of the link; None = not measured.
        provenance: origin of the record.
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
        """Compare all fields but the model's graph: its fingerprint is part of the key."""
        names = [name for name in self.__struct_fields__ if name != "model"]
        return type(other) is JobRecord and all(getattr(self, name) == getattr(other, name) for name in names)

    def __ne__(self, other: object) -> bool:
        return not self == other  # Define `__ne__`, because msgspec's own compares identities.

    __hash__ = None  # type: ignore[assignment]  # not hashable, because its key contains dicts

    @property
    def created_s(self) -> float:  # noqa: D102
        return self.provenance.created_s

    @property
    def id(self) -> str:
        """Return the record's id, which is the digest of its key. Users may abbreviate it."""
        return self.key.digest()

    @property
    def speedup(self) -> float:
        """Return the speed relative to the untuned default.

        Speedups of different jobs are comparable, because each is a ratio of times in the same job.
        """
        return self.default_span_s / self.best_span_s

    @property
    def relative_noise(self) -> float:
        """Return the noise as a fraction of the best communication time."""
        return self.noise_s / self.best_span_s

    def supersedes(self, old: JobRecord) -> bool:
        """Return whether this record replaces a stored one with the same key.

        A complete record replaces an incomplete one, never the reverse. Of two incomplete records, the one with more
        trials wins, because a job that continues a search starts with the earlier trials. If the records differ in age
        by more than `STALE_AFTER_S` or have equal knobs, the newer one wins. Otherwise the faster one wins if its lead
        exceeds the noise, else the newer one. A job that has run a stored setting and found it slow passes it to
        `Store.put` as `disproved`.
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
        return (
            f"best_span_s must be at most {MAX_SPEEDUP:g} times as fast or as slow as default_span_s, found "
            f"{self.speedup:.3g} times as fast"
        )

    def to_json(self) -> dict[str, Any]:  # noqa: D102
        return {**self.body(), "model": graph_to_json(self.model), "topology": plain(self.topology)}

    @property
    def graphs(self) -> dict[str, Any]:  # noqa: D102
        return {"model": self.model, "topology": self.topology}

    def body(self) -> dict[str, Any]:  # noqa: D102
        names = (name for name in self.__struct_fields__ if name not in ("model", "topology"))
        body: dict[str, Any] = {name: plain(getattr(self, name)) for name in names}
        if body["link"] is not None:
            # Omit the link's `busy` (processors that a rank keeps busy): it depends on the hosts, and earlier releases
            # reject the field.
            del body["link"]["busy"]
        if body["gain"] is None:
            # Omit an empty gain: earlier releases reject the field.
            del body["gain"]
        return body

    @classmethod
    def from_json(cls, data: object, graphs: Mapping[str, Any] = MappingProxyType({})) -> Self:  # noqa: D102
        data = checked(dict[str, Any], data)
        if "model" in data:
            data["model"] = checked(GraphJson, data["model"], at="model").graph()
        if isinstance(link := data.get("link"), dict) and "latency_s" in link:
            data["link"] = checked(_OldLink, link, at="link").model()
        # In trials, null stands for infinity, because JSON has no infinity.
        if isinstance(trials := data.get("trials"), list):
            failed = {"span_s": math.inf}
            data["trials"] = [
                one | failed if isinstance(one, dict) and one.get("span_s", 0) is None else one for one in trials
            ]
        return super().from_json(data, graphs)

    def describe_gain(self) -> str:
        """Return the speedup over the default in words, with its confidence interval if it was proved."""
        return describe_gain(self.gain, self.default_span_s, self.best_span_s)

    def describe(self) -> str:
        """Return the job in words, such as `ResNet on 8 ranks on 2 hosts`."""
        name = self.provenance.model_name or f"model {self.key.model[:8]}"
        return f"{name} on {self.topology.describe()}"


# ── rows of sparse gradients ─────────────────────────────────────────────────────────────────────────────────────────


LIKE = 1.25
"""Largest ratio between the numbers of accessed parameter rows at which two access patterns count as alike."""

LIKE_COVERAGE = 0.1
"""Largest difference of `Skew.covered` between alike access patterns. It is the fraction of row accesses that go to
frequent rows. If it falls by this much during a job, the job counts the frequent rows again.
"""

_Rows = Annotated[int, Meta(ge=1, le=2**48)]
_Touches = Annotated[float, Meta(ge=1, le=1e18)]


class Skew(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Access pattern of the rows of one parameter with sparse gradients, such as an embedding.

    Attributes:
        touched: mean number of rows accessed per iteration, summed over ranks, so that shared rows count several times.
        union: mean number of distinct rows accessed per iteration by any rank.
        curve: points (number of most frequent rows, fraction of all accesses), ascending in both values, starting at
            one row.

    Raises:
        RegistryError: the curve is empty or does not ascend.
    """

    touched: _Touches
    union: _Touches
    curve: Annotated[tuple[tuple[_Rows, Annotated[float, Meta(ge=0, le=1)]], ...], Meta(max_length=1000)]

    def __post_init__(self) -> None:
        valid = self.touched > 0 and self.union > 0 and self.curve
        require(valid, "skew", "touched, union and number of points in curve above 0", self, RegistryError)
        for (rows, part), (more, larger) in pairwise(self.curve):
            if rows >= more or part > larger:
                rule = "an ascending number of rows, and a share that does not fall"
                require(False, "skew.curve", rule, f"{[more, larger]} after {[rows, part]}", RegistryError)

    def covered(self, rows: int) -> float:
        """Return the fraction of accesses that go to the `rows` most frequent rows.

        Values between points are interpolated over the logarithm of the rows.
        """
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
        """Return the distance of two access patterns: 0 = equal, at most 1 = alike."""
        counts = (
            abs(math.log(here / there)) / math.log(LIKE)
            for here, there in ((self.touched, other.touched), (self.union, other.union))
        )
        sizes = {rows for rows, _ in (*self.curve, *other.curve)}
        coverage = max(abs(self.covered(rows) - other.covered(rows)) for rows in sizes)
        return max(*counts, coverage / LIKE_COVERAGE)

    def bucket(self) -> list[int]:
        """Return the access pattern as a few integers, which become a part of the record's id.

        Integers of alike access patterns are equal or differ by one.
        """
        middle = max(1, round(math.sqrt(self.curve[-1][0])))
        counts = (round(math.log(count) / math.log(LIKE)) for count in (self.touched, self.union))
        return [*counts, round(self.covered(middle) / LIKE_COVERAGE)]


class RowsKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties that must be equal for a job to consider a stored algorithm that sums sparse gradients.

    Attributes:
        topology: fingerprint of the topology.
        ranks: number of ranks that sum the rows.
        n_rows: number of rows of the parameter.
        row_bytes: size of one row.
        dtype: name of the element type.
        aggregator: True if an aggregator for frequent rows is available.
        versions: relevant library versions, by name.
        fixed: values of the knobs that the user fixed, by name.
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
    """Fastest sparse algorithm that a job found for one parameter: a `SparsePlan` without its list of frequent rows.

    Attributes:
        key: properties by which a job finds the record.
        name: name of the parameter.
        skew: access pattern of the parameter's rows.
        path: algorithm that sums the rows over the ranks.
        cold: algorithm that sums infrequent rows.
        block_rows: number of consecutive rows in a block.
        n_hot: number of frequent rows.
        span_s: median time of a reduction in seconds.
        aggregated: True if an aggregator summed the frequent rows.
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
        """Return the distance of this record from a parameter's (name, skew).

        0 to 1 if the names are equal, 1 to 2 if they differ. Infinity if the access patterns are not alike or the
        record is older than `STALE_AFTER_S`.
        """
        name, skew = wanted
        apart = self.skew.distance(skew)
        stale = self.created_s < time.time() - STALE_AFTER_S
        return math.inf if stale or apart > 1.0 else apart + float(self.name != name)

    def implausible(self) -> str:  # noqa: D102
        hot, n_rows = self.path is SparsePath.HOT_COLD, self.key.n_rows
        if self.cold not in COLD_PATHS:
            return f"cold must be an algorithm for infrequent rows, found {self.cold.value}"
        if self.aggregated and not (hot and self.key.aggregator):
            return f"aggregated must be false unless path is {SparsePath.HOT_COLD.value} and the key has an aggregator"
        if not int(hot) <= self.n_hot <= (n_rows if hot else 0):
            return (
                f"n_hot must be {int(hot)} to {n_rows if hot else 0} for a parameter of {n_rows} rows with the path "
                f"{self.path.value}, found {self.n_hot}"
            )
        if max(self.skew.union, self.skew.curve[-1][0]) > n_rows:
            return f"skew must not have more accessed rows than the {n_rows} rows of the parameter"
        return ""


# ── sharded training ─────────────────────────────────────────────────────────────────────────────────────────────────


class ShardsKey(Key, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties that must be equal for a setting of sharded training to be considered.

    Attributes:
        topology: fingerprint of the topology.
        ranks: number of ranks that share one model.
        model: digest of the sharded modules, in order of use.
        transport: transport of the shards.
        versions: relevant library versions, by name.
        fixed: values of the knobs that the user fixed, by name.
    """

    kind = "shards"

    topology: Text
    ranks: Ranks
    model: Text
    transport: Text
    versions: Texts = {}
    fixed: Texts = {}


class ShardsRecord(StoredSetting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fastest setting that a job found for a model with sharded parameters. JSON stores the fields of `setting` inline.

    Attributes:
        key: properties by which a job finds the record.
        memory_bytes: memory that the job allowed in addition to that of untuned training.
        modules: number of sharded modules.
        setting: fastest setting. It uses only compressors that the key allows.
        gain: fraction of the untuned step time that the setting saves; 0 if the untuned setting was kept.
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
        """Return by how much this record's `memory_bytes` exceeds `wanted`, the memory that a job allows.

        Infinity if this record allowed less memory or is older than `STALE_AFTER_S`.
        """
        stale = self.created_s < time.time() - STALE_AFTER_S
        return math.inf if stale or self.memory_bytes < wanted else float(self.memory_bytes - wanted)

    def implausible(self) -> str:  # noqa: D102
        knobs, most, allowed = self.setting, max(1, self.modules), self.key.fixed.get("lossy", "")
        if not {knobs.gathers, knobs.scatters} <= {"", *allowed.split(",")}:
            return (
                f"gathers and scatters must use the permitted compressors ({allowed or 'none'}), found "
                f"{knobs.gathers or 'none'} and {knobs.scatters or 'none'}"
            )
        kept = [*knobs.kept, *knobs.near]
        if len(set(kept)) < len(kept) or any(place >= self.modules for place in kept):
            return (
                f"kept and near must be distinct indices of the {self.modules} modules, "
                f"found {knobs.kept} and {knobs.near}"
            )
        if list(knobs.joined) != sorted({*knobs.joined} & {*range(1, self.modules)}):
            return f"joined must be ascending indices from 1 of the {self.modules} modules, found {knobs.joined}"
        wrong = (name for name in ("ahead", "behind") if getattr(knobs, name) > most)
        return next((f"{name} must be at most {most}, found {getattr(knobs, name)}" for name in wrong), "")

    def to_json(self) -> dict[str, Any]:  # noqa: D102
        data = super().to_json()
        return {**data.pop("setting"), **data}

    @classmethod
    def from_json(cls, data: object, graphs: Mapping[str, Any] = MappingProxyType({})) -> Self:  # noqa: D102
        data = checked(dict[str, Any], data)
        setting = {one.name: data.pop(one.name) for one in fields(ShardKnobs) if one.name in data}
        return super().from_json({**data, "setting": setting}, graphs)


RECORDS: tuple[type[StoredSetting], ...] = (JobRecord, RowsRecord, ShardsRecord)
