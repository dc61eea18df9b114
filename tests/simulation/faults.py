"""Faults of a simulated job: drawn from a seed, printable, and reduced to the smallest set that still fails."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any


class Kind(Enum):
    """A fault, or a change of the hosts."""

    KILL_RANK = "kill rank"
    FREEZE_RANK = "freeze rank"
    KILL_AGENT = "kill agent"
    FREEZE_AGENT = "freeze agent"
    KILL_DRIVER = "kill driver"
    FREEZE_DRIVER = "freeze driver"
    HOST_VANISHES = "host vanishes"
    BREAK = "break"
    PARTITION = "partition"
    ONE_WAY = "one way"
    HOSTS = "hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        at_s: simulated time.
        kind: kind of fault.
        draw: number in [0, 1) that selects the victim among those alive.
        seconds: duration; 0 = permanent or instantaneous.
    """

    at_s: float
    kind: Kind
    draw: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything about a simulated job that is decided before it begins. The same plan gives the same history.

    Attributes:
        seed: seed of delays and durations.
        slots: slots of each host.
        min_ranks: smallest number of ranks that may train.
        max_ranks: largest number of ranks; None = all slots.
        goes_on: whether an agent starts a successor of a lost driver.
        discovers: whether hosts may change.
        drops: whether hosts of failed ranks are dropped.
        step_s: range of the duration of a step.
        start_s: range of the time that a rank takes to start.
        long_step_share: share of steps that take 20 to 50 s.
        finishes: whether the script ends, after the faults.
        calm_s: time after which no fault occurs.
        faults: faults in order of time.
    """

    seed: int
    slots: tuple[int, ...]
    min_ranks: int
    max_ranks: int | None = None
    goes_on: bool = True
    discovers: bool = False
    drops: bool = False
    step_s: tuple[float, float] = (1.0, 4.0)
    start_s: tuple[float, float] = (1.0, 5.0)
    long_step_share: float = 0.0
    finishes: bool = False
    calm_s: float = 60.0
    faults: tuple[Fault, ...] = field(default=())

    def encode(self) -> str:
        """Return the plan as a line for `decode`."""
        return json.dumps({**asdict(self), "faults": [{**asdict(f), "kind": f.kind.value} for f in self.faults]})

    @classmethod
    def decode(cls, line: str) -> Plan:
        """Return the plan of a line from `encode`."""
        values: dict[str, Any] = json.loads(line)
        faults = tuple(Fault(**{**fault, "kind": Kind(fault["kind"])}) for fault in values.pop("faults"))
        pairs = {name: tuple(values.pop(name)) for name in ("slots", "step_s", "start_s")}
        return cls(**values, **pairs, faults=faults)


_LASTS_S = {
    Kind.FREEZE_RANK: (0.5, 40.0),
    Kind.FREEZE_AGENT: (0.5, 90.0),
    Kind.FREEZE_DRIVER: (0.5, 90.0),
    Kind.PARTITION: (1.0, 100.0),
    Kind.ONE_WAY: (1.0, 100.0),
}


def drawn(seed: int) -> Plan:
    """Draw a plan from a seed."""
    rng = random.Random(seed)
    slots = tuple(rng.randint(1, 2) for _ in range(rng.randint(2, 5)))
    goes_on = rng.random() < 0.7
    calm_s = rng.uniform(20.0, 120.0)
    kinds = [kind for kind in Kind if kind is not Kind.HOSTS]
    discovers = rng.random() < 0.3
    if discovers:
        kinds += [Kind.HOSTS, Kind.HOSTS]
    faults = []
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(kinds)
        near = rng.choice(faults).at_s + rng.uniform(0.0, 2.0) if faults and rng.random() < 0.3 else None
        at_s = near if near is not None else rng.uniform(0.0, calm_s)
        lasts = rng.uniform(*_LASTS_S.get(kind, (0.0, 0.0)))
        faults.append(Fault(at_s=round(at_s, 3), kind=kind, draw=round(rng.random(), 4), seconds=round(lasts, 2)))
    slowly = rng.random() < 0.1
    return Plan(
        seed=seed,
        slots=slots,
        min_ranks=rng.randint(1, max(1, sum(slots) // 2)),
        max_ranks=rng.choice([None, None, sum(slots), 3 if sum(slots) > 3 else None]),
        goes_on=goes_on,
        discovers=discovers,
        drops=rng.random() < 0.2,
        long_step_share=0.05 if slowly else 0.0,
        finishes=rng.random() < 0.3,
        calm_s=round(calm_s, 2),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def smallest(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Remove faults and options from a plan as long as it still fails."""
    shrunk = True
    while shrunk:
        shrunk = False
        for index in range(len(plan.faults)):
            fewer = replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
            if fails(fewer):
                plan, shrunk = fewer, True
                break
    for change in ({"discovers": False}, {"finishes": False}, {"drops": False}, {"max_ranks": None}):
        simpler = replace(plan, **change)
        if simpler != plan and fails(simpler):
            plan = simpler
    return plan
