"""What can happen to a job of the chaos run, to which rank and when, and how the job must then end."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from enum import Enum

RANKS = 3
STEPS = 100
WARMUP_STEPS = 40
TWO = "two at once"


class Fault(Enum):
    """One fault of one job."""

    KILL = "SIGKILL"
    SEGMENTATION = "SIGSEGV"
    STOP = "SIGSTOP for longer than the stall limit"
    PAUSE = "SIGSTOP, soon SIGCONT"
    RAISE = "exception"
    EXIT = "sys.exit"
    EXIT_IN_C = "exit in C"
    OUT_OF_MEMORY = "out of memory in a rank"
    NO_DESCRIPTORS = "no descriptors left in a rank"
    DISK_FULL = "full disk for registry, logs and output files"
    OUTPUT_FULL = "full disk for the console's output, too"
    OUTPUT_CLOSED = "closed console"
    REGISTRY_DELETED = "deleted registry"
    REGISTRY_DAMAGED = "damaged registry"
    INTERRUPT = "Ctrl-C at the launcher"
    TERMINATE = "SIGTERM at the launcher"
    LAUNCHER_KILLED = "SIGKILL of the launcher"
    MPIEXEC_KILLED = "SIGKILL of mpiexec"

    @property
    def ends_the_job(self) -> bool:
        """Whether training cannot go on after it."""
        return self not in HARMLESS

    @property
    def by_the_rank(self) -> bool:
        """Whether the rank does it to itself when it is told to."""
        return self in BY_THE_RANK


HARMLESS = {
    Fault.PAUSE,
    Fault.NO_DESCRIPTORS,
    Fault.DISK_FULL,
    Fault.OUTPUT_FULL,
    Fault.OUTPUT_CLOSED,
    Fault.REGISTRY_DELETED,
    Fault.REGISTRY_DAMAGED,
}
BY_THE_RANK = {Fault.RAISE, Fault.EXIT, Fault.EXIT_IN_C, Fault.OUT_OF_MEMORY, Fault.NO_DESCRIPTORS}
SIGNALS = {Fault.KILL: signal.SIGKILL, Fault.SEGMENTATION: signal.SIGSEGV}
LAUNCHER_SIGNALS = {
    Fault.INTERRUPT: signal.SIGINT,
    Fault.TERMINATE: signal.SIGTERM,
    Fault.LAUNCHER_KILLED: signal.SIGKILL,
}


class Stage(Enum):
    """The part of a job's life that a fault falls into."""

    START = "start"
    WARMUP = "warm-up"
    TRAINING = "training"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault with its place and moment.

    Attributes:
        rank: whom it hits, where it hits a rank.
        step: it waits until that rank has done so many steps; None = from the launch of the job.
        delay_s: and this much longer.
        lasts_s: until a stopped rank goes on.
        exit_code: of a rank that exits.
    """

    fault: Fault
    stage: Stage
    rank: int
    step: int | None
    delay_s: float
    lasts_s: float
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One job: what hits it (one or two strikes), and how it runs.

    Attributes:
        transport: None = tuned.
        shuts_down: the script calls `shutdown()` at its end.
    """

    number: int
    strikes: tuple[Strike, ...]
    transport: str | None
    shuts_down: bool

    @property
    def name(self) -> str:
        """The row that it counts in."""
        return self.strikes[0].fault.value if len(self.strikes) == 1 else TWO

    @property
    def ends_the_job(self) -> bool:
        """Whether one of its faults does."""
        return any(strike.fault.ends_the_job for strike in self.strikes)


def draw(jobs: int, seed: int) -> list[Scenario]:
    """Scenarios in which each fault comes up equally often, and two at once twice as often.

    Fewer jobs with the same seed are the first ones of more jobs.
    """
    rng = random.Random(seed)
    kinds: list[Fault | None] = []
    while len(kinds) < jobs:
        again: list[Fault | None] = [*Fault, None, None]
        rng.shuffle(again)
        kinds += again
    return [_scenario(number, kind, random.Random(f"{seed} {number}")) for number, kind in enumerate(kinds[:jobs])]


def _scenario(number: int, kind: Fault | None, rng: random.Random) -> Scenario:
    if kind is not None:
        strikes = (_strike(kind, rng),)
    else:
        first = _strike(rng.choice([fault for fault in Fault if fault not in LAUNCHER_SIGNALS]), rng)
        second = _strike(rng.choice([fault for fault in Fault if fault is not first.fault]), rng)
        strikes = (first, second) if rng.random() < 0.3 else (first, _soon_after(first, second, rng))
    return Scenario(
        number=number,
        strikes=strikes,
        transport=rng.choice([None, None, "shared_memory", "gloo", "mpi"]),
        shuts_down=rng.random() < 0.5,
    )


def _strike(fault: Fault, rng: random.Random) -> Strike:
    stage = rng.choices([*Stage], weights=[12, 38, 38, 12])[0]
    if fault is Fault.NO_DESCRIPTORS and stage is Stage.START:
        stage = Stage.WARMUP  # without them nothing can be imported
    match stage:
        case Stage.START:
            step, delay_s = None, rng.uniform(0.0, 5.0)
        case Stage.WARMUP:
            step, delay_s = rng.randrange(1, 20), rng.uniform(0.0, 1.0)  # probes run within one of the first steps
        case Stage.TRAINING:
            step, delay_s = rng.randrange(WARMUP_STEPS, STEPS), rng.uniform(0.0, 0.02)
        case Stage.END:
            step, delay_s = STEPS, rng.uniform(0.0, 0.5)
    return Strike(
        fault=fault,
        stage=stage,
        rank=rng.randrange(RANKS),
        step=step,
        delay_s=delay_s,
        lasts_s=rng.uniform(0.1, 1.5),
        exit_code=rng.randrange(2, 120),
    )


def _soon_after(first: Strike, second: Strike, rng: random.Random) -> Strike:
    return Strike(
        fault=second.fault,
        stage=first.stage,
        rank=rng.choice([rank for rank in range(RANKS) if rank != first.rank]),
        step=first.step,
        delay_s=first.delay_s + rng.uniform(0.0, 1.0),
        lasts_s=second.lasts_s,
        exit_code=second.exit_code,
    )
