"""Settings of jobs with sharded parameters (FSDP): knobs, their space, and a model that predicts the time of a step.

A "gather" is an all-gather of a module's parameters, a "scatter" is a reduce-scatter of its gradients.

In jobs of several hosts, one step is traced and the network is measured. A step with another setting is then simulated
as three parallel queues: computation, gathers and scatters. Gathers and scatters share the network. The setting with
the shortest predicted step is tried first, all other settings in the order of their predictions.

A setting is chosen only if a paired comparison proves it faster than the default (`autotune/paired.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from sirtaki.errors import TuningError, require
from sirtaki.fields import Text
from sirtaki.measures import counted

from .model.replayer import (
    ALL_RANKS,
    Activity,
    Edge,
    Phase,
    ReplayGraph,
    ReplayNode,
    ResourceDemand,
    SharedResource,
    replay,
)

if TYPE_CHECKING:
    # For type checking only: it imports torch, which `sirtaki registry` must not do.
    from sirtaki.comm.compress import Codec

SHARDED_FILE = "sharded.json"
"""Name of the file in a recording's folder that contains the `RecordedStep`."""

STREAMS = (1, 2, 3, 4, 6, 8, 12, 16)

MOST_SCATTERING = 2
"""Maximum number of concurrent scatters (reduce-scatters).

A second scatter uses the network while the first one waits, so that a third scatter gains nothing.
"""


# Number or index of a sharded module. msgspec checks its limits only when a setting is read from a file or a database.
_Modules = Annotated[int, Meta(ge=0, le=2**20)]
_Places = tuple[Annotated[int, Meta(ge=0, lt=2**20)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKnobs:
    """One setting of all parameters that tuning chooses in a job with sharded parameters (FSDP).

    Modules are identified by their index in the order of use in the forward pass. Tuples of indices are ascending.

    Attributes:
        streams: number of connections to each other rank. Each gather or scatter is split over all of them. With
            PyTorch's own collectives: 1 = gathers and scatters share a communicator, 2 = scatters have a separate one.
        ahead: forward prefetch: number of modules whose parameters are gathered early in the forward pass.
        behind: backward prefetch: number of modules whose parameters are gathered early in the backward pass.
        kept: modules that are not resharded after the forward pass: they keep their gathered parameters until the
            backward pass.
        near: modules in the node cache: after the forward pass, each node keeps a copy of their parameters, sharded
            over the node's ranks. The backward pass gathers it within the node (ZeRO++'s hpZ: Wang et al., 2023).
        scattering: maximum number of modules whose gradients are scattered concurrently.
        joined: modules that are coalesced with the module before them. Coalesced modules are gathered and scattered as
            one bucket, and `ahead`, `behind` and `scattering` count buckets.
        gathers: name of the compressor of gathered parameters; empty = parameters are not compressed.
        scatters: name of the compressor of scattered gradients; empty = gradients are not compressed.
    """

    streams: Annotated[int, Meta(ge=1, le=1024)]
    ahead: _Modules = 1
    behind: _Modules = 1
    kept: _Places = ()
    near: _Places = ()
    scattering: Annotated[int, Meta(ge=1, le=1024)] = 1
    joined: _Places = ()
    gathers: Text = ""
    scatters: Text = ""

    def buckets(self, modules: int) -> list[range]:
        """Divide the modules into the buckets that are gathered and scattered together, in the order of use.

        Args:
            modules: number of sharded modules.
        """
        joined = frozenset(self.joined)
        starts = [place for place in range(modules) if place not in joined]
        return [range(start, stop) for start, stop in itertools.pairwise([*starts, modules])]

    @property
    def codecs(self) -> tuple[Codec | None, Codec | None]:
        """Return the codecs that compress gathered parameters and scattered gradients; None = not compressed."""
        from sirtaki.comm.compress import codec_of

        gathers, scatters = (codec_of(name) if name else None for name in (self.gathers, self.scatters))
        return gathers, scatters

    def describe(self) -> str:
        """Describe the setting in one line for logs."""
        kept = f", {len(self.kept)} kept" if self.kept else ""
        if self.near:
            kept += f", {len(self.near)} kept by each node"
        packed = ", ".join(
            f"{what} packed by {name}"
            for what, name in (("parameters", self.gathers), ("gradients", self.scatters))
            if name
        )
        packed = packed and f", {packed}"
        if self.scattering > 1:
            kept += f", {self.scattering} scatters at a time"
        if self.joined:
            kept += f", {len(self.joined)} sent with the module before"
        return f"{counted(self.streams, 'stream')}, gathers {self.ahead} ahead and {self.behind} behind{kept}{packed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpace:
    """Settings that a search may choose for a job with sharded parameters (FSDP).

    Modules are identified by their index in the order of use in the forward pass. Tuples of indices are ascending.

    Attributes:
        modules: number of sharded modules.
        streams: permitted numbers of connections, ascending.
        whole_bytes: size of the gathered parameters of each module, `(modules,)`.
        dropped: modules that are resharded after the forward pass by default. The backward pass gathers their
            parameters again.
        memory_bytes: GPU memory that a setting may use in addition to the memory of the default setting.
        node_ranks: number of ranks of each node, if a node cache is possible; otherwise 0.
        lossy: names of the compressors that the user allows.
        scattering: maximum number of concurrent scatters (reduce-scatters of gradients).
        joinable: modules that can be coalesced with the module before them.
        gathered_ahead: values of `ahead` and `behind` that the user has set. None = both are tuned.
    """

    modules: int
    streams: tuple[int, ...]
    whole_bytes: tuple[int, ...]
    dropped: tuple[int, ...]
    memory_bytes: int = 0
    node_ranks: int = 0
    lossy: tuple[str, ...] = ()
    scattering: int = MOST_SCATTERING
    joinable: tuple[int, ...] = ()
    gathered_ahead: tuple[int, int] | None = None

    def __contains__(self, knobs: ShardKnobs) -> bool:
        return (
            knobs.streams in self.streams
            and 0 <= knobs.ahead < max(2, self.modules)
            and 1 <= knobs.behind < max(2, self.modules)
            and self.gathered_ahead in (None, (knobs.ahead, knobs.behind))
            and set(knobs.kept) <= set(self.dropped)
            and set(knobs.near) <= (set(self.dropped).difference(knobs.kept) if self.node_ranks else set())
            and 1 <= knobs.scattering <= self.scattering
            and set(knobs.joined) <= set(self.joinable)
            and {knobs.gathers, knobs.scatters} <= {"", *self.lossy}
            and self.extra_bytes(knobs) <= self.memory_bytes
        )

    def extra_bytes(self, knobs: ShardKnobs) -> int:
        """Return an upper bound of the peak memory that a setting needs in addition to the default setting's memory.

        Compressed shards that are being sent are not counted. In the backward pass, a module has four tensors of its
        size: parameters, gradients, the tensor being scattered, and the gathered parameters of the next module. The
        forward pass needs less if at most two modules are gathered ahead. Each further concurrent scatter adds a
        tensor. Coalesced modules add four tensors of the largest bucket's size, which are ignored below `LITTLE_BYTES`.
        """
        largest = max(self.whole_bytes, default=0)
        forward, backward = max(0, knobs.ahead - 2), knobs.behind - 1 + knobs.scattering - 1
        coalesced = 0
        if knobs.joined:
            buckets = [one for one in knobs.buckets(self.modules) if len(one) > 1]
            coalesced = (4 + backward) * max(sum(self.whole_bytes[place] for place in one) for one in buckets)
        kept = sum(self.whole_bytes[place] for place in knobs.kept)
        near = sum(-(-self.whole_bytes[place] // self.node_ranks) for place in knobs.near)
        if knobs.near:
            near += self.in_flight_bytes
        return max(forward, backward) * largest + kept + near + (coalesced if coalesced > LITTLE_BYTES else 0)

    @property
    def in_flight_bytes(self) -> int:
        """Return the memory of messages in flight while parameters are copied into the node cache (`ShardKnobs.near`).

        Two messages are in flight at a time. Each has at most the size of one rank's shard of the largest module's
        copy.
        """
        return 2 * -(-max(self.whole_bytes[place] for place in self.dropped) // self.node_ranks)

    def joining(self, bucket_bytes: int) -> tuple[int, ...]:
        """Coalesce modules in the order of use into buckets of at most `bucket_bytes`.

        Return the modules that are coalesced with the module before them (`ShardKnobs.joined`).
        """
        joined, size = list[int](), 0
        for place, more in enumerate(self.whole_bytes):
            together = place in self.joinable and size + more <= bucket_bytes
            size = more + (size if together else 0)
            if together:
                joined.append(place)
        return tuple(joined)

    def keeping(self, knobs: ShardKnobs, *, near: bool = False) -> ShardKnobs:
        """Return a setting that keeps the gathered parameters of as many modules as memory allows, the last ones first.

        Args:
            knobs: setting to which modules are added.
            near: whether modules are added to the node cache (`ShardKnobs.near`) instead of `ShardKnobs.kept`.
        """
        for place in reversed(self.dropped):
            kept = tuple(sorted({*(knobs.near if near else knobs.kept), place}))
            one = replace(knobs, near=kept) if near else replace(knobs, kept=kept)
            if one in self:
                knobs = one
        return knobs

    def around(self, knobs: ShardKnobs, tried: Collection[ShardKnobs]) -> Iterator[ShardKnobs]:
        """Yield untried permitted settings that differ from `knobs` in one knob, the most effective knobs first."""
        index = self.streams.index(knobs.streams)
        none_kept = replace(knobs, kept=(), near=())
        last_kept = replace(none_kept, kept=self.dropped[-1:])
        most_kept = self.keeping(none_kept)
        most_near = self.keeping(last_kept if last_kept in self else none_kept, near=True)
        neighbours = (*self.streams[index + 1 : index + 2], *self.streams[max(0, index - 1) : index])
        candidates = [
            *(replace(knobs, gathers=name, scatters=name) for name in self.lossy),
            *(replace(knobs, joined=self.joining(size)) for size in (*BUCKET_BYTES, 0)),
            *sorted((most_kept, most_near), key=lambda one: -len(one.kept) - len(one.near)),
            *(last_kept, none_kept),
            *(replace(knobs, scattering=number) for number in range(self.scattering, 0, -1)),
            *(replace(knobs, scatters=name) for name in ("", *self.lossy)),
            *(replace(knobs, gathers=name) for name in ("", *self.lossy)),
            *(replace(knobs, streams=streams) for streams in neighbours),
            *(replace(knobs, ahead=knobs.ahead + step) for step in (1, -1)),
            *(replace(knobs, behind=knobs.behind + step) for step in (1, -1)),
        ]
        return (one for one in dict.fromkeys(candidates) if one != knobs and one in self and one not in tried)


LITTLE_BYTES = 4 << 20
"""Extra memory of coalesced modules that is ignored, because network connections take about as much."""

BUCKET_BYTES = (1 << 20, 1 << 18)
"""Bucket sizes that are tried for coalesced modules.

Smaller buckets are not worthwhile: their start-up takes longer than their transmission.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLink:
    """Times of gathers (all-gathers) and scatters (reduce-scatters) between the ranks of a process group, as a model.

    Attributes:
        latency_s: time of a gather of a few bytes.
        gathered: {number of connections to each rank: bytes of whole parameters gathered per second}.
        scatter_times: time of a scatter divided by the time of a gather of equal size.
        message_s: processor time of one gather or scatter, independent of its size.
        near_bytes_per_s: bytes of whole parameters gathered per second within a node.
    """

    latency_s: float
    gathered: Mapping[int, float]
    scatter_times: float = 1.0
    message_s: float = 0.0
    near_bytes_per_s: float = 1e12

    def bytes_per_s(self, streams: int) -> float:
        """Return the bytes of whole parameters gathered per second over `streams` connections.

        The rate is interpolated between measured numbers of connections. Below the smallest measured number it is
        proportional to the number, above the largest it is constant.
        """
        fewer = max((count for count in self.gathered if count <= streams), default=0)
        more = min((count for count in self.gathered if count >= streams), default=0)
        if not fewer:
            return self.gathered[more] * streams / more
        if not more:
            return self.gathered[fewer]
        part = (streams - fewer) / (more - fewer) if more > fewer else 0.0
        return self.gathered[fewer] + part * (self.gathered[more] - self.gathered[fewer])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStep:
    """Traced step of a job with sharded parameters, and a model that predicts the step's time with other settings.

    Attributes:
        forward_s: computation time of each module in the forward pass, `(modules,)`, in the order of use.
        backward_s: computation time of each module in the backward pass, `(modules,)`, in the order of the forward
            pass.
        rest_s: time of a step besides both passes, mainly of the optimizer.
        gathered_bytes: size of each module's whole parameters as they are sent without compression, `(modules,)`.
        scattered_bytes: size of each module's whole gradients as they are sent without compression, `(modules,)`;
            0 = no gradients.
        link: cost model of gathers and scatters.

    Raises:
        TuningError: the tuples differ in length, or a time is negative.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    rest_s: float
    gathered_bytes: tuple[int, ...]
    scattered_bytes: tuple[int, ...]
    link: ShardLink

    def __post_init__(self) -> None:
        lengths = [len(self.forward_s), len(self.backward_s), len(self.gathered_bytes), len(self.scattered_bytes)]
        name = "forward_s, backward_s, gathered_bytes and scattered_bytes"
        require(len(set(lengths)) == 1, name, "one value per module in each list", f"{lengths} values", TuningError)
        least_s = min(0.0, self.rest_s, *self.forward_s, *self.backward_s)
        require(least_s >= 0.0, "a measured time", "at least 0 s", least_s, TuningError)

    def expected_s(self, space: ShardSpace, knobs: ShardKnobs) -> float:
        """Predict the time of a training step with a setting, in seconds."""
        return _ShardedReplay(self, space, knobs).total_s

    def computed_s(self, bucket: range, *, backward: bool = False) -> float:
        """Return the computation time of a bucket of coalesced modules in the forward or in the backward pass.

        A bucket saves gathers and scatters. Their processor time is subtracted.
        """
        span_s = sum((self.backward_s if backward else self.forward_s)[bucket.start : bucket.stop])
        messages = (len(bucket) - 1) * (2 if backward else 1)
        return max(LEAST_COMPUTED * span_s, span_s - messages * self.link.message_s)

    def fastest(self, space: ShardSpace, default: ShardKnobs) -> ShardKnobs:
        """Return the setting with the shortest predicted step that a local search finds.

        The search starts from `default`, and from settings that dynamic programming has found: some with modules that
        are kept gathered, some with coalesced modules. It ends when no change of a single knob gains more than
        `LEAST_STEP`.
        """
        candidates: Iterable[ShardKnobs] = (default, *self._keeping(space, default), *self._joining(space, default))
        best, best_s = default, math.inf
        while True:
            spans_s = {one: self.expected_s(space, one) for one in candidates}
            rival = min(spans_s, key=spans_s.__getitem__, default=best)
            if rival == best or spans_s[rival] > (1.0 - LEAST_STEP) * best_s:
                return best
            best, best_s = rival, spans_s[rival]
            candidates = space.around(best, ())

    def _keeping(self, space: ShardSpace, knobs: ShardKnobs) -> Iterator[ShardKnobs]:
        """Yield settings in which some modules keep their gathered parameters after forward, as memory permits.

        The kept modules are those that shorten the backward pass most.
        """
        for behind, scattering in itertools.product((1, 2), range(1, space.scattering + 1)):
            none_kept = replace(knobs, behind=behind, scattering=scattering, kept=(), near=())
            if none_kept in space:
                yield from (one for one in (self._kept(space, none_kept), space.keeping(none_kept)) if one in space)

    def _kept(self, space: ShardSpace, knobs: ShardKnobs) -> ShardKnobs:
        """Choose the modules to keep gathered, and those to keep in the node cache, by dynamic programming.

        Return `knobs` with these modules. The programme goes from the last module to the first. A state consists of the
        chosen modules, their memory, and three times: when the next module may start, when its parameters are gathered,
        and when the network is idle. States that are worse than another state in all respects are dropped. In this
        model, the network runs one operation at a time, and the next module's gather precedes this module's scatter.
        """
        rate, last, node_ranks = self.link.bytes_per_s(knobs.streams), space.modules - 1, space.node_ranks
        spare_bytes = space.memory_bytes - space.extra_bytes(knobs)
        in_flight_bytes = space.in_flight_bytes if node_ranks and space.dropped else 0
        dropped = frozenset(space.dropped)
        packed = [packed_share(codec) for codec in knobs.codecs]
        gather_s = [packed[0] * size / rate for size in self.gathered_bytes]
        scatter_s = [packed[1] * self.link.scatter_times * size / rate for size in self.scattered_bytes]

        def choices(state: _Kept, place: int, begun_s: float) -> Iterator[_Kept]:
            latency_s = self.link.latency_s
            if place not in dropped:
                yield replace(state, gathered_s=begun_s)
                return
            gathered_s = max(state.free_s, begun_s + latency_s) + gather_s[place]
            yield replace(state, gathered_s=gathered_s, free_s=gathered_s)
            size = space.whole_bytes[place]
            if (kept_bytes := state.kept_bytes + size) <= spare_bytes - (in_flight_bytes if state.near else 0):
                yield replace(state, kept=(place, *state.kept), kept_bytes=kept_bytes, gathered_s=begun_s)
            if (
                node_ranks
                and (kept_bytes := state.kept_bytes + -(-size // node_ranks)) <= spare_bytes - in_flight_bytes
            ):
                gathered_s = begun_s + size / self.link.near_bytes_per_s
                yield replace(state, near=(place, *state.near), kept_bytes=kept_bytes, gathered_s=gathered_s)

        states = _undominated(list(choices(_Kept(), last, 0.0)))
        for place in range(last, -1, -1):
            after = []
            for state in states:
                begun_s = max(state.begun_s, state.gathered_s)
                for one in choices(state, place - 1, begun_s) if place else [state]:
                    ended_s = begun_s + self.backward_s[place]
                    if not scatter_s[place]:
                        after.append(replace(one, begun_s=ended_s))
                        continue
                    if knobs.scattering == 1:
                        ended_s = max(ended_s, state.scattered_s)
                    sent_s = max(one.free_s, ended_s + self.link.latency_s) + scatter_s[place]
                    after.append(replace(one, begun_s=ended_s, free_s=sent_s, scattered_s=sent_s))
            states = _undominated(after)
        best = min(states, key=lambda state: max(state.begun_s, state.free_s))
        return replace(knobs, kept=best.kept, near=best.near)

    def _joining(self, space: ShardSpace, knobs: ShardKnobs) -> Iterator[ShardKnobs]:
        """Yield permitted settings with coalesced modules, for each bucket size in `BUCKET_BYTES`."""
        if not space.joinable:
            return
        bare = replace(knobs, ahead=1, joined=())
        for bucket_bytes in BUCKET_BYTES:
            joined = self.joined(space, bare, bucket_bytes)
            yield from (
                one for one in (replace(bare, joined=joined, ahead=n) for n in (1, 2)) if joined and one in space
            )

    def joined(self, space: ShardSpace, knobs: ShardKnobs, bucket_bytes: int) -> tuple[int, ...]:
        """Choose the modules to coalesce into buckets of at most `bucket_bytes`, by dynamic programming.

        The model assumes that one bucket is gathered ahead. Let b and b + 1 be successive buckets. In the forward pass,
        b computes while b + 1 is gathered. In the backward pass, b + 1 computes while b is gathered, and b + 1 is
        scattered afterwards. The programme minimises the sum of

            forward     Σ max(compute of b, gather of b + 1)
            backward    Σ max(compute of b + 1, gather of b + scatter of b + 1)
        """
        rate, latency_s, count = self.link.bytes_per_s(knobs.streams), self.link.latency_s, space.modules
        dropped, joinable = set(space.dropped).difference(knobs.kept, knobs.near), frozenset(space.joinable)
        packed = [packed_share(codec) for codec in knobs.codecs]

        def sums(values: Sequence[float], times: float = 1.0) -> list[float]:
            return [times * total for total in itertools.accumulate(values, initial=0.0)]

        whole_bytes = sums(space.whole_bytes)
        gathered_s = sums(self.gathered_bytes, packed[0] / rate)
        again = [size if place in dropped else 0 for place, size in enumerate(self.gathered_bytes)]
        again_s = sums(again, packed[0] / rate)
        scattered_s = sums(self.scattered_bytes, packed[1] * self.link.scatter_times / rate)

        def of(totals: Sequence[float], bucket: range) -> float:
            return totals[bucket.stop] - totals[bucket.start]

        def sent(totals: Sequence[float], bucket: range) -> float:
            span_s = of(totals, bucket)
            return span_s + latency_s if span_s else 0.0

        @functools.cache
        def computed_s(bucket: range, backward: bool = False) -> float:
            return self.computed_s(bucket, backward=backward)

        def both_s(bucket: range, later: range) -> float:
            forth_s = max(computed_s(bucket), sent(gathered_s, later))
            return forth_s + max(computed_s(later, True), sent(again_s, bucket) + sent(scattered_s, later))

        # `best[stop]` is {bucket that ends at module `stop`: (minimum time of all modules up to `stop`, bucket before
        # it in the fastest division)}.
        best = [dict[range, tuple[float, range | None]]() for _ in range(count + 1)]
        for start in range(count):
            for bucket in (range(start, stop) for stop in range(start + 1, count + 1)):
                if len(bucket) > 1 and (bucket[-1] not in joinable or of(whole_bytes, bucket) > bucket_bytes):
                    break
                options: list[tuple[float, range | None]] = [
                    (spent_s + both_s(other, bucket), other) for other, (spent_s, _) in best[start].items()
                ]
                if not start:
                    spent_s = sent(gathered_s, bucket) + computed_s(bucket, True) + sent(scattered_s, bucket)
                    options = [(spent_s, None)]
                best[bucket.stop][bucket] = min(options, key=lambda option: option[0])
        end_s = {
            bucket: spent_s + computed_s(bucket) + sent(again_s, bucket) for bucket, (spent_s, _) in best[count].items()
        }
        last: range | None = min(end_s, key=end_s.__getitem__)
        joined = list[int]()
        while last is not None:
            joined += last[1:]
            _, last = best[last.stop][last]
        return tuple(sorted(joined))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """State of the dynamic programme that chooses the modules whose parameters stay gathered after the forward pass.

    A state is a choice for the last modules of the model. The programme goes through the modules in the order of the
    backward pass. The "next" module is the next one to compute.

    Attributes:
        kept, near: modules chosen for `ShardKnobs.kept` and `ShardKnobs.near`.
        kept_bytes: memory that the chosen modules keep.
        begun_s: earliest start of the next module's computation, apart from the wait for the module's parameters.
        gathered_s: time at which the next module's parameters have been gathered.
        free_s: time from which the network is idle.
        scattered_s: end of the last scatter (reduce-scatter of gradients).
    """

    kept: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    kept_bytes: int = 0
    begun_s: float = 0.0
    gathered_s: float = 0.0
    free_s: float = 0.0
    scattered_s: float = 0.0


def _undominated(states: Sequence[_Kept]) -> list[_Kept]:
    """Return the states (choices of modules to keep gathered) that no other state beats in memory and in all times.

    If there are more than `MOST_STATES`, only every second (third, …) one is returned.
    """
    found: list[tuple[float, _Kept]] = []
    for state in sorted(states, key=lambda one: (one.kept_bytes, max(one.begun_s, one.gathered_s), one.free_s)):
        begun_s = max(state.begun_s, state.gathered_s)
        if not any(
            other_s <= begun_s and other.free_s <= state.free_s and other.scattered_s <= state.scattered_s
            for other_s, other in found
        ):
            found.append((begun_s, state))
    return [state for _, state in found[:: -(-len(found) // MOST_STATES) or 1]]


MOST_STATES = 128
"""Maximum number of states that the dynamic programme for kept modules has after each module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """Traced training step in a recording of a job, to predict step times with other settings later.

    Attributes:
        step: the traced step.
        space: permitted settings of the recorded job.
        setting: setting with which the step was traced.
    """

    step: ShardedStep
    space: ShardSpace
    setting: ShardKnobs

    def by_memory(self, parts: int = 4) -> Iterator[tuple[ShardSpace, ShardKnobs]]:
        """Yield the predicted fastest setting for each of `parts` + 1 amounts of extra memory.

        The amounts are equally spaced, from zero to the amount with which every rank can keep the gathered parameters
        of all modules.
        """
        bare = replace(self.setting, kept=(), near=())
        most = self.space.extra_bytes(replace(bare, kept=self.space.dropped))
        for part in range(parts + 1):
            space = replace(self.space, memory_bytes=most * part // parts)
            yield space, self.step.fastest(space, bare if bare in space else self.setting)


LEAST_COMPUTED = 0.1
"""Minimum computation time that is predicted for coalesced modules, as a fraction of their traced time."""

LEAST_STEP = 0.002
"""The local search changes a knob only for a predicted gain of at least this fraction of the step's time."""

COMPUTING, GATHERING, SCATTERING = range(3)
NETWORK, NODE = range(2)


class _ShardedReplay:
    """Simulation of a training step of a sharded model (FSDP), as a graph of operations.

    As in FSDP, the gathers of prefetched modules are launched when a module is about to be used, and a scatter is
    awaited when its memory is needed.

    Attributes:
        total_s: simulated time of the step.
    """

    def __init__(self, step: ShardedStep, space: ShardSpace, knobs: ShardKnobs) -> None:
        self._step, self._knobs, self._link = step, knobs, step.link
        self._dropped = frozenset(space.dropped).difference(knobs.kept)
        self._buckets = knobs.buckets(space.modules)
        self._nodes, self._edges = list[ReplayNode](), list[Edge]()
        self._rate = step.link.bytes_per_s(knobs.streams)
        self._packed = [packed_share(codec) for codec in knobs.codecs]
        self._last_compute = self._add(COMPUTING, Activity.COMPUTE, Phase.OTHER)
        self._forward()
        self._backward()
        both = max(1.0, step.link.bytes_per_s(2 * knobs.streams) / self._rate)
        servers = [
            SharedResource(name="network", totals=(1.0, both), is_link=True),
            SharedResource(name="node", totals=(1.0,)),
        ]
        lanes = ["computation", "gathers", "scatters"]
        self.total_s = (
            step.rest_s
            + replay(ReplayGraph(nodes=self._nodes, edges=self._edges, lanes=lanes, servers=servers)).total_s
        )

    def _forward(self) -> None:
        buckets, gathers = self._buckets, list[list[int]]()
        for number, bucket in enumerate(buckets):
            if number == len(gathers):
                gathers.append(self._gather(bucket))
            self._compute(Phase.FORWARD, 0.0, after=gathers[number])
            while len(gathers) < min(len(buckets), number + 1 + self._knobs.ahead):
                gathers.append(self._gather(buckets[len(gathers)]))
            self._compute(Phase.FORWARD, self._step.computed_s(bucket))

    def _backward(self) -> None:
        step, knobs, buckets = self._step, self._knobs, self._buckets
        gathers, scatters = dict[int, list[int]](), list[int]()
        for number, bucket in reversed(list(enumerate(buckets))):
            for other in range(number, max(-1, number - knobs.behind - 1), -1):
                # Launch the prefetch of the next bucket only after the gather of the current bucket, as FSDP does.
                if other == number - 1:
                    self._compute(Phase.BACKWARD, 0.0, after=gathers[number])
                if other not in gathers:
                    near = [place for place in buckets[other] if place in knobs.near]
                    far = [place for place in buckets[other] if place in self._dropped.difference(near)]
                    gathers[other] = self._gather(far)
                    for place in near:
                        gathers[other] += self._gather([place], near=True)
            self._compute(Phase.BACKWARD, step.computed_s(bucket, backward=True), after=gathers[number])
            if size := sum(step.scattered_bytes[place] for place in bucket):
                waited = scatters[-knobs.scattering :][:1] if len(scatters) >= knobs.scattering else []
                self._compute(Phase.BACKWARD, 0.0, after=waited)
                seconds = self._packed[1] * size * self._link.scatter_times / self._rate
                scatters.append(self._send(SCATTERING, NETWORK, seconds))
        self._compute(Phase.OTHER, 0.0, after=scatters)

    def _gather(self, places: Sequence[int], *, near: bool = False) -> list[int]:
        """Add a gather of the modules' parameters to the graph, and return its nodes; none without modules."""
        size = sum(self._step.gathered_bytes[place] for place in places)
        if not places:
            return []
        if near:
            return [self._send(GATHERING, NODE, size / self._link.near_bytes_per_s)]
        return [self._send(GATHERING, NETWORK, self._packed[0] * size / self._rate)]

    def _send(self, lane: int, server: int, seconds: float) -> int:
        """Add a collective to the graph, launched after the computation added so far. Return the collective's node."""
        latency_s = self._link.latency_s if server == NETWORK else 0.0
        self._edges.append((self._last_compute, len(self._nodes), latency_s))
        return self._add(
            lane, Activity.COLLECTIVE, Phase.OTHER, works=(ResourceDemand(server=server, seconds=seconds),)
        )

    def _compute(self, phase: Phase, seconds: float, *, after: Sequence[int] = ()) -> None:
        self._edges += [(other, len(self._nodes), 0.0) for other in (self._last_compute, *after)]
        self._last_compute = self._add(COMPUTING, Activity.COMPUTE, phase, fixed_s=seconds)

    def _add(
        self,
        lane: int,
        activity: Activity,
        phase: Phase,
        *,
        fixed_s: float = 0.0,
        works: tuple[ResourceDemand, ...] = (),
    ) -> int:
        self._nodes.append(
            ReplayNode(
                lane=lane, activity=activity, phase=phase, rank=ALL_RANKS, iteration=0, fixed_s=fixed_s, works=works
            )
        )
        return len(self._nodes) - 1


def packed_share(codec: Codec | None) -> float:
    """Return the ratio of a large tensor's compressed size to its uncompressed size; 1.0 without a codec."""
    from sirtaki.comm.compress import packed_bytes

    numel = 1 << 20
    return 1.0 if codec is None else packed_bytes(codec, numel) / (4 * numel)
