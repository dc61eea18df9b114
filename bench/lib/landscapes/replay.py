"""A backward pass beside its all-reduces, replayed event by event under any physics.

It shares nothing with `autotune.model.simulator`, which the planners are given: an all-reduce here waits for a host
that serves one at a time, then for a latency that may depend on its size, then moves its bytes, whose worth depends on
its size, at a rate that depends on how many move and on whether there is computation beside; and communication may
slow the computation down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


def _nothing(_: float) -> float:
    return 0.0


def _one(_: float) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """What all-reduces cost on one route.

    Attributes:
        capacity: bytes a second in total while so many all-reduces move bytes, beside computation or not.
        latency_s: seconds before the first byte moves, by size in bytes.
        host_s: seconds of the host that serves one all-reduce at a time, by size.
        quality: share of the rate that an all-reduce of that size turns into progress, by size.
        slowdown: factor on the computation while so many all-reduces are under way.
    """

    capacity: Callable[[int, bool], float]
    latency_s: Callable[[float], float]
    host_s: Callable[[float], float] = _nothing
    quality: Callable[[float], float] = _one
    slowdown: Callable[[float], float] = _one


@dataclass(frozen=True, slots=True)
class Message:
    """One all-reduce: when it can begin (seconds of undisturbed computation), how large it is, and its stream."""

    ready_s: float
    size_bytes: float
    stream: int


def replay(messages: Sequence[Message], *, compute_s: float, physics: Physics) -> float:
    """Seconds from the beginning of the backward pass until it and all messages are done.

    Args:
        messages: in the order in which they are issued; none is ready before the one before it.
        compute_s: the backward pass, undisturbed.
        physics: of the route.
    """
    queues: dict[int, deque[Message]] = {}
    waiting: list[tuple[float, int, float, int]] = []  # latency over at, tie-breaker, work, stream
    moving: list[tuple[float, int, int]] = []  # clock of transmissions at which it is done, tie-breaker, stream
    busy: set[int] = set()
    now_s = clock = done_s = host_free_s = 0.0
    following, number = 0, 0

    def begin(message: Message) -> None:
        nonlocal host_free_s, number
        size = message.size_bytes
        host_free_s = max(now_s, host_free_s) + physics.host_s(size)
        number += 1
        heappush(
            waiting,
            (host_free_s + physics.latency_s(size), number, size / physics.quality(size), message.stream),
        )
        busy.add(message.stream)

    while True:
        while following < len(messages) and (messages[following].ready_s <= done_s + 1e-12 or done_s >= compute_s):
            message = messages[following]
            following += 1
            if message.stream in busy:
                queues.setdefault(message.stream, deque()).append(message)
            else:
                begin(message)
        computing = done_s < compute_s
        pace = 1.0 / physics.slowdown(len(busy)) if computing else 1.0
        share = physics.capacity(len(moving), computing) / len(moving) if moving else 0.0
        until_s = []  # of each kind of event
        if computing:
            goal_s = min(messages[following].ready_s, compute_s) if following < len(messages) else compute_s
            until_s.append(max(0.0, goal_s - done_s) / pace)
        if waiting:
            until_s.append(max(0.0, waiting[0][0] - now_s))
        if moving:
            until_s.append(max(0.0, moving[0][0] - clock) / share)
        if not until_s:
            return now_s
        step_s = min(until_s)
        now_s += step_s
        clock += step_s * share
        if computing:
            done_s += step_s * pace
            if compute_s - done_s < 1e-12:
                done_s = compute_s
        while waiting and waiting[0][0] <= now_s + 1e-12:
            _, tie, work, stream = heappop(waiting)
            heappush(moving, (clock + work, tie, stream))
        while moving and moving[0][0] <= clock * (1 + 1e-12) + 1e-9:
            stream = heappop(moving)[2]
            busy.discard(stream)
            if queues.get(stream):
                begin(queues[stream].popleft())


def round_s(size_bytes: float, streams: int, rounds: int, physics: Physics) -> float:
    """Seconds of that many equal messages in a row on each stream, with no computation beside."""
    messages = [Message(0.0, size_bytes, stream) for _ in range(rounds) for stream in range(streams)]
    return replay(messages, compute_s=0.0, physics=physics)
