"""Which setting suits a job that trains with sharded parameters: what can be set, how long a step would take, and how
the fastest is found.

Between hosts one step is traced and the network is measured. A step with another setting is then played on three
resources (computation, the gathers' way, the scatters' way) of which the last two share the network; what is fastest
there is tried first, and the other settings in the order of what is expected of them.

A setting is kept only if it has beaten the default side by side: the two run in turns, so that what happens to the
network or the machine meanwhile happens to both, and what counts is how the steps of one turn compare.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from sirtaki.errors import TuningError
from sirtaki.fields import Text

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
    from sirtaki.comm.compress import Codec  # imports torch, which the registry must not

SHARDED_FILE = "sharded.json"
"""In the folder of a recording: a `RecordedStep`."""

STREAMS = (1, 2, 3, 4, 6, 8, 12, 16)

MOST_SCATTERING = 2
"""The second one leaves while the network is still busy with the first; there is nothing for a third one to fill."""


# Limits hold where a setting is read from a file or a database.
_Modules = Annotated[int, Meta(ge=0, le=2**20)]
_Places = tuple[Annotated[int, Meta(ge=0, lt=2**20)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKnobs:
    """One setting.

    Attributes:
        streams: connections to each other rank that a gather or scatter is cut over. Where PyTorch's own collectives
            carry shards: 1 = gathers and scatters share a communicator, 2 = scatters have one of their own.
        ahead: so many modules ahead their parameters are gathered in the forward pass.
        behind: the same in the backward pass.
        kept: modules that keep their gathered parameters until the backward pass: places in order of use, ascending.
        near: modules that keep them spread over the ranks of each node, which gather them there for the backward pass
            (ZeRO++'s hpZ: Wang et al., 2023); places, too.
        scattering: so many modules' gradients may be scattered at the same time.
        joined: modules that are gathered, and scattered, as one with the module before them; places, too. What is said
            of modules ahead, behind and scattered then holds for such buckets.
        gathers: by which compressor shards are packed that are gathered; empty = they travel as they are.
        scatters: the same of gradients that are scattered.
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
        """Places of the modules that are gathered as one, for all of so many modules, in the order of use."""
        joined = frozenset(self.joined)
        starts = [place for place in range(modules) if place not in joined]
        return [range(start, stop) for start, stop in itertools.pairwise([*starts, modules])]

    @property
    def codecs(self) -> tuple[Codec | None, Codec | None]:
        """What packs gathers, and what packs scatters; None = they travel as they are."""
        from sirtaki.comm.compress import codec_of

        gathers, scatters = (codec_of(name) if name else None for name in (self.gathers, self.scatters))
        return gathers, scatters

    def describe(self) -> str:
        """In a few words, for logs."""
        kept = f", {len(self.kept)} kept" if self.kept else ""
        if self.near:
            kept += f", {len(self.near)} kept by each node"
        plural = "" if self.streams == 1 else "s"
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
        return f"{self.streams} stream{plural}, gathers {self.ahead} ahead and {self.behind} behind{kept}{packed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpace:
    """What may be set.

    Attributes:
        modules: how many are sharded.
        streams: that can be used, ascending.
        whole_bytes: of the gathered parameters of each module, in the order in which they are used.
        dropped: modules whose parameters are gathered again for the backward pass unless they are kept; places in that
            order, ascending.
        memory_bytes: that may be used above what the default takes.
        node_ranks: ranks of each node, if they can keep parameters together; else 0.
        lossy: compressors that the user allows.
        scattering: so many modules' gradients can be scattered at the same time.
        joinable: modules that can be gathered and scattered as one with the module before them; places, too.
        gathered_ahead: how far in the forward and in the backward pass, if that is not to be changed.
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
        """Memory at the peak above that of the default, at most; without packed shards on their way.

        In the backward pass a module has parameters, gradients, the tensor that is scattered, and what is gathered for
        the next one: four times its size; the forward pass stays below that with two gathered ahead. Each further
        scatter has a tensor of its own. What modules are joined for comes above what they take one by one: the same
        four times, of a bucket; a few megabytes of that count as nothing.
        """
        largest = max(self.whole_bytes, default=0)
        forward, backward = max(0, knobs.ahead - 2), knobs.behind - 1 + knobs.scattering - 1
        joint = 0
        if knobs.joined:
            buckets = [one for one in knobs.buckets(self.modules) if len(one) > 1]
            joint = (4 + backward) * max(sum(self.whole_bytes[place] for place in one) for one in buckets)
        kept = sum(self.whole_bytes[place] for place in knobs.kept)
        near = sum(-(-self.whole_bytes[place] // self.node_ranks) for place in knobs.near)
        if knobs.near:
            near += self.handed_bytes
        return max(forward, backward) * largest + kept + near + (joint if joint > LITTLE_BYTES else 0)

    @property
    def handed_bytes(self) -> int:
        """Bytes of two modules' parts that are on the way to the other ranks of the node, where it keeps parameters."""
        return 2 * -(-max(self.whole_bytes[place] for place in self.dropped) // self.node_ranks)

    def joining(self, bucket_bytes: int) -> tuple[int, ...]:
        """Modules joined with those before them while together they have no more bytes than that."""
        joined, size = list[int](), 0
        for place, more in enumerate(self.whole_bytes):
            together = place in self.joinable and size + more <= bucket_bytes
            size = more + (size if together else 0)
            if together:
                joined.append(place)
        return tuple(joined)

    def keeping(self, knobs: ShardKnobs, *, near: bool = False) -> ShardKnobs:
        """Keeps as many modules as memory allows, the last ones first, by each rank or (`near`) by nodes."""
        for place in reversed(self.dropped):
            kept = tuple(sorted({*(knobs.near if near else knobs.kept), place}))
            one = replace(knobs, near=kept) if near else replace(knobs, kept=kept)
            if one in self:
                knobs = one
        return knobs

    def around(self, knobs: ShardKnobs, tried: Collection[ShardKnobs]) -> Iterator[ShardKnobs]:
        """Yield settings that differ in one thing and are not in `tried`, those that usually matter most first."""
        place = self.streams.index(knobs.streams)
        bare = replace(knobs, kept=(), near=())
        last = replace(bare, kept=self.dropped[-1:])
        most, nearest = self.keeping(bare), self.keeping(last if last in self else bare, near=True)
        beside = (*self.streams[place + 1 : place + 2], *self.streams[max(0, place - 1) : place])
        candidates = [
            *(replace(knobs, gathers=name, scatters=name) for name in self.lossy),
            *(replace(knobs, joined=self.joining(size)) for size in (*BUCKET_BYTES, 0)),
            *sorted((most, nearest), key=lambda one: -len(one.kept) - len(one.near)),
            *(last, bare),
            *(replace(knobs, scattering=number) for number in range(self.scattering, 0, -1)),
            *(replace(knobs, scatters=name) for name in ("", *self.lossy)),
            *(replace(knobs, gathers=name) for name in ("", *self.lossy)),
            *(replace(knobs, streams=streams) for streams in beside),
            *(replace(knobs, ahead=knobs.ahead + step) for step in (1, -1)),
            *(replace(knobs, behind=knobs.behind + step) for step in (1, -1)),
        ]
        return (one for one in dict.fromkeys(candidates) if one != knobs and one in self and one not in tried)


LITTLE_BYTES = 4 << 20
"""Of joined modules, above what they take one by one: about as much as connections take."""

BUCKET_BYTES = (1 << 20, 1 << 18)
"""Of modules that are joined: from some hundred thousand bytes on, messages take longer than to begin them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLink:
    """What gathers and scatters take, between the ranks of one group.

    Attributes:
        latency_s: of a gather of next to nothing.
        gathered: bytes of whole parameters that are gathered in a second, by the number of connections to each rank.
        scatter_times: how many times as long as a gather of as many bytes a scatter takes.
        message_s: of processors, that one gather or scatter more takes, however small.
        near_bytes_per_s: the same as `gathered`, of gathers within a node.
    """

    latency_s: float
    gathered: Mapping[int, float]
    scatter_times: float = 1.0
    message_s: float = 0.0
    near_bytes_per_s: float = 1e12

    def bytes_per_s(self, streams: int) -> float:
        """Rate over so many connections: interpolated between measured ones, in proportion below, constant above."""
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
    """One step of a job: how long it would take with another setting.

    Attributes:
        forward_s: computation of each module in the forward pass, `(modules,)`, in the order of use.
        backward_s: the same in the backward pass, which takes the modules in the opposite order.
        rest_s: what the step does otherwise, its optimizer's part above all.
        gathered_bytes: whole parameters of each module, as they travel where the setting packs nothing.
        scattered_bytes: whole gradients of each module, likewise; 0 = it has none.
        link: between the ranks.

    Raises:
        TuningError: there is not one of each for every module, or a time is negative.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    rest_s: float
    gathered_bytes: tuple[int, ...]
    scattered_bytes: tuple[int, ...]
    link: ShardLink

    def __post_init__(self) -> None:
        of_modules = (self.forward_s, self.backward_s, self.gathered_bytes, self.scattered_bytes)
        if len(set(map(len, of_modules))) > 1 or min(0.0, self.rest_s, *self.forward_s, *self.backward_s) < 0.0:
            raise TuningError(f"a step needs as many times, none of them negative, as there are modules: {of_modules}")

    def expected_s(self, space: ShardSpace, knobs: ShardKnobs) -> float:
        """How long the step takes with that setting."""
        return _ShardedReplay(self, space, knobs).total_s

    def computed_s(self, bucket: range, *, backward: bool = False) -> float:
        """How long those modules compute in a pass, less what begins fewer messages where they are joined."""
        span_s = sum((self.backward_s if backward else self.forward_s)[bucket.start : bucket.stop])
        messages = (len(bucket) - 1) * (2 if backward else 1)
        return max(LEAST_COMPUTED * span_s, span_s - messages * self.link.message_s)

    def fastest(self, space: ShardSpace, default: ShardKnobs) -> ShardKnobs:
        """What no setting that differs in one thing is expected to beat, from the best kept modules on."""
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
        """Yields settings whose kept modules shorten the backward pass most, within the memory that is left."""
        for behind, scattering in itertools.product((1, 2), range(1, space.scattering + 1)):
            bare = replace(knobs, behind=behind, scattering=scattering, kept=(), near=())
            if bare in space:
                yield from (one for one in (self._kept(space, bare), space.keeping(bare)) if one in space)

    def _kept(self, space: ShardSpace, knobs: ShardKnobs) -> ShardKnobs:
        """With the modules kept, by each rank or by nodes, that a dynamic programme keeps, from the last to the first.

        A state is what has been kept, the memory that takes, when the next module may begin, when its parameters are
        there, and when the network has nothing more to do; what is worse in all of them than another one is left out.
        The network does one thing after the other, and the next module's parameters are gathered before this one's
        gradients are scattered.
        """
        rate, last, node_ranks = self.link.bytes_per_s(knobs.streams), space.modules - 1, space.node_ranks
        left = space.memory_bytes - space.extra_bytes(knobs)
        handed_on = space.handed_bytes if node_ranks and space.dropped else 0
        dropped = frozenset(space.dropped)
        packed = [packed_share(codec) for codec in knobs.codecs]
        gather_s = [packed[0] * size / rate for size in self.gathered_bytes]
        scatter_s = [packed[1] * self.link.scatter_times * size / rate for size in self.scattered_bytes]

        def choices(state: _Kept, place: int, begun_s: float) -> Iterator[_Kept]:
            latency_s = self.link.latency_s
            if place not in dropped:
                yield replace(state, come_s=begun_s)
                return
            come_s = max(state.free_s, begun_s + latency_s) + gather_s[place]
            yield replace(state, come_s=come_s, free_s=come_s)
            size = space.whole_bytes[place]
            if (kept_bytes := state.kept_bytes + size) <= left - (handed_on if state.near else 0):
                yield replace(state, kept=(place, *state.kept), kept_bytes=kept_bytes, come_s=begun_s)
            if node_ranks and (kept_bytes := state.kept_bytes + -(-size // node_ranks)) <= left - handed_on:
                come_s = begun_s + size / self.link.near_bytes_per_s
                yield replace(state, near=(place, *state.near), kept_bytes=kept_bytes, come_s=come_s)

        states = _undominated(list(choices(_Kept(), last, 0.0)))
        for place in range(last, -1, -1):
            after = []
            for state in states:
                begun_s = max(state.begun_s, state.come_s)
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
        """With the modules joined that a dynamic programme joins, in buckets as large as memory allows, or smaller.

        Of two buckets that follow each other, with one gathered ahead, the earlier one computes in the forward pass
        while the network gathers the later one; in the backward pass the later one computes while it gathers the
        earlier one and scatters what is done. Whatever takes longer counts, and the sum of that is the least:

            forward     Σ max(compute of b, gather of b + 1)
            backward    Σ max(compute of b + 1, gather of b + scatter of b + 1)
        """
        if not space.joinable:
            return
        bare = replace(knobs, ahead=1, joined=())
        for bucket_bytes in BUCKET_BYTES:
            joined = self.joined(space, bare, bucket_bytes)
            yield from (
                one for one in (replace(bare, joined=joined, ahead=n) for n in (1, 2)) if joined and one in space
            )

    def joined(self, space: ShardSpace, knobs: ShardKnobs, bucket_bytes: int) -> tuple[int, ...]:
        """The modules that are best joined with those before them, as above, in buckets of no more bytes than that."""
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

        # The least of all ways to a bucket, by where it ends, and the bucket before it.
        best = [dict[range, tuple[float, range | None]]() for _ in range(count + 1)]
        for start in range(count):
            for bucket in (range(start, stop) for stop in range(start + 1, count + 1)):
                if len(bucket) > 1 and (bucket[-1] not in joinable or of(whole_bytes, bucket) > bucket_bytes):
                    break
                ways: list[tuple[float, range | None]] = [
                    (spent_s + both_s(other, bucket), other) for other, (spent_s, _) in best[start].items()
                ]
                if not start:
                    spent_s = sent(gathered_s, bucket) + computed_s(bucket, True) + sent(scattered_s, bucket)
                    ways = [(spent_s, None)]
                best[bucket.stop][bucket] = min(ways, key=lambda way: way[0])
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
    """What has been decided of the modules from some place on, and what follows from it."""

    kept: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    kept_bytes: int = 0
    begun_s: float = 0.0
    come_s: float = 0.0
    free_s: float = 0.0
    scattered_s: float = 0.0


def _undominated(states: Sequence[_Kept]) -> list[_Kept]:
    """Those that are better than each other one in something; some of them where there are many."""
    found: list[tuple[float, _Kept]] = []
    for state in sorted(states, key=lambda one: (one.kept_bytes, max(one.begun_s, one.come_s), one.free_s)):
        begun_s = max(state.begun_s, state.come_s)
        if not any(
            other_s <= begun_s and other.free_s <= state.free_s and other.scattered_s <= state.scattered_s
            for other_s, other in found
        ):
            found.append((begun_s, state))
    return [state for _, state in found[:: -(-len(found) // MOST_STATES) or 1]]


MOST_STATES = 128
"""Of the dynamic programme, after each module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step of a job, and what may be set in it, for questions afterwards.

    Attributes:
        step: that was traced.
        space: of the job.
        setting: that ran.
    """

    step: ShardedStep
    space: ShardSpace
    setting: ShardKnobs

    def by_memory(self, parts: int = 4) -> Iterator[tuple[ShardSpace, ShardKnobs]]:
        """What is expected to be fastest with no memory, some, and as much as lets every rank keep all parameters."""
        bare = replace(self.setting, kept=(), near=())
        most = self.space.extra_bytes(replace(bare, kept=self.space.dropped))
        for part in range(parts + 1):
            space = replace(self.space, memory_bytes=most * part // parts)
            yield space, self.step.fastest(space, bare if bare in space else self.setting)


LEAST_COMPUTED = 0.1
"""The share of traced computation that is left, whatever messages are said to have taken of it."""

LEAST_STEP = 0.002
"""The share of a step that a change must be expected to gain."""

COMPUTING, GATHERING, SCATTERING = range(3)
NETWORK, NODE = range(2)


class _ShardedReplay:
    """A step's graph, as it is made, and how long it takes.

    FSDP has modules gathered when another one is about to be used, and waits for a scatter when it needs its memory.
    """

    def __init__(self, step: ShardedStep, space: ShardSpace, knobs: ShardKnobs) -> None:
        self._step, self._knobs, self._link = step, knobs, step.link
        self._dropped = frozenset(space.dropped).difference(knobs.kept)
        self._buckets = knobs.buckets(space.modules)
        self._nodes, self._edges = list[ReplayNode](), list[Edge]()
        self._rate = step.link.bytes_per_s(knobs.streams)
        self._packed = [packed_share(codec) for codec in knobs.codecs]
        self._computed = self._add(COMPUTING, Activity.COMPUTE, Phase.OTHER)  # the last piece of computation
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
                # One that is ahead leaves when this one has come.
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
        """What is waited for: nothing if these are no modules."""
        size = sum(self._step.gathered_bytes[place] for place in places)
        if not places:
            return []
        if near:
            return [self._send(GATHERING, NODE, size / self._link.near_bytes_per_s)]
        return [self._send(GATHERING, NETWORK, self._packed[0] * size / self._rate)]

    def _send(self, lane: int, server: int, seconds: float) -> int:
        """Leaves when what has been computed until now is done."""
        latency_s = self._link.latency_s if server == NETWORK else 0.0
        self._edges.append((self._computed, len(self._nodes), latency_s))
        return self._add(
            lane, Activity.COLLECTIVE, Phase.OTHER, works=(ResourceDemand(server=server, seconds=seconds),)
        )

    def _compute(self, phase: Phase, seconds: float, *, after: Sequence[int] = ()) -> None:
        self._edges += [(other, len(self._nodes), 0.0) for other in (self._computed, *after)]
        self._computed = self._add(COMPUTING, Activity.COMPUTE, phase, fixed_s=seconds)

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
    """Of a tensor's bytes, which are left if it is packed; 1.0 if it is not."""
    from sirtaki.comm.compress import packed_bytes

    numel = 1 << 20
    return 1.0 if codec is None else packed_bytes(codec, numel) / (4 * numel)
