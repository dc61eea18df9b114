"""What an agent does about what it hears from its driver and its ranks: without sockets, processes or a clock."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .job_members import Phase, RankEnd

BEAT_S = 2.0
"""How often agent and driver tell each other that they are there."""

DRIVER_SILENT_S = 60.0
"""After which a driver is given up: it may have been stopped for a while by its terminal."""

KILL_GRACE_S = 3.0
"""Between asking a rank to end and killing it."""

LEAVE_GRACE_S = 30.0
"""The same where SIGTERM ends the job and its ranks write a checkpoint with their next commit."""


def end_grace_s(number: int | None, environ: Mapping[str, str]) -> float:
    """How long ranks in `environ` may take to end because of a signal, if it is one."""
    writes = number == signal.SIGTERM and environ.get("SIRTAKI_CHECKPOINT_DIR")
    return LEAVE_GRACE_S if writes else KILL_GRACE_S


NO_GENERATION: Mapping[str, Any] = {"number": 0, "workers": [], "older": [], "has_state": False, "left_out": {}}
"""What an agent reports as the newest generation before there is one."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a rank is, as its agent has heard.

    Attributes:
        slot: its place on the host.
        phase: of it.
        generation, rank: that it is or was in last; 0 and None = it has been in none.
        has_state: it has said that it holds the job's state.
        attendee: where it listens, while it waits.
        kill_at_s: when it is to be killed; None = it is not.
        patience_s: it has computed for so long without looking for changes; 0 = never for long.
    """

    slot: int
    phase: Phase = Phase.STARTING
    generation: int = 0
    rank: int | None = None
    has_state: bool = False
    attendee: Mapping[str, Any] = field(default_factory=dict)
    kill_at_s: float | None = None
    patience_s: float = 0.0

    @property
    def told(self) -> tuple[Any, ...]:
        """Returns what a driver is told of the rank, as values that JSON can hold."""
        return self.slot, self.phase.value, self.generation, self.rank, self.has_state, self.attendee


class AgentActions(Protocol):
    """Carries out what the rules decide: processes and connections of a real, a simulated or Ray's host."""

    def start_rank(self, worker: int, slot: int) -> None:
        """Starts a process; OSError if it cannot."""
        ...

    def ask_to_end(self, worker: int) -> None:
        """Asks a rank to end, with SIGTERM."""
        ...

    def kill(self, worker: int) -> None:
        """Kills a rank at once; its end is told as any other's."""
        ...

    def tell_rank(self, worker: int, message: Mapping[str, Any]) -> None:
        """Nothing happens if it is gone."""
        ...

    def tell_driver(self, message: Mapping[str, Any]) -> None:
        """What is told to a driver that is gone is dropped."""
        ...


class AgentRules:
    """Decides what the agent of one host does about each message and each end of a rank.

    Attributes:
        ranks: that are there, by worker.
        agents: number and places of each, this one too, as the driver has told last.
        ends: no rank is to be left, nor this agent.
    """

    def __init__(self, actions: AgentActions, *, host: str, now_s: float) -> None:
        self._actions, self._host = actions, host
        self.ranks: dict[int, Progress] = {}
        self.agents: list[tuple[int, list[tuple[str, int]]]] = []
        self.ends = False
        self._generation: dict[str, Any] = dict(NO_GENERATION)
        self._heard_s = self._beat_s = self._looked_s = now_s

    def meet_driver(self, places: list[tuple[str, int]], now_s: float) -> None:
        """There is a driver: it hears all that one has to know that knows nothing of this agent.

        Args:
            places: where a driver would listen that this agent has started.
            now_s: the time.
        """
        self._heard_s = now_s
        ranks = [[worker, *progress.told] for worker, progress in self.ranks.items()]
        report = {"host": self._host, "places": places, "ranks": ranks, "generation": self._generation}
        self._actions.tell_driver({"is": "up", **report})
        for worker, progress in self.ranks.items():
            self._ask_patience(worker, progress.patience_s)

    def end(self, now_s: float, *, grace_s: float = KILL_GRACE_S) -> None:
        """Ends all ranks; the agent is to follow.

        Args:
            now_s: the time.
            grace_s: after which ranks are killed that train and have not ended themselves.
        """
        self.ends = True
        for worker, progress in self.ranks.items():
            if progress.kill_at_s is None:
                progress.kill_at_s = now_s + (grace_s if progress.phase is Phase.MEMBER else KILL_GRACE_S)
                self._actions.ask_to_end(worker)

    def tick(self, now_s: float) -> bool:
        """Time has passed, to be told at least twice a second; False = the driver is to be given up."""
        for worker, progress in list(self.ranks.items()):
            if progress.kill_at_s is not None and now_s >= progress.kill_at_s:
                self._actions.kill(worker)
        if now_s - self._looked_s > DRIVER_SILENT_S / 2:
            self._heard_s = now_s  # this process was stopped, or the machine slept
        self._looked_s = now_s
        if now_s - self._beat_s > BEAT_S:
            self._beat_s = now_s
            self._actions.tell_driver({"is": "beat"})
        return now_s - self._heard_s <= DRIVER_SILENT_S

    def hear_driver(self, message: Mapping[str, Any], now_s: float) -> None:
        """It wants something done."""
        self._heard_s = now_s
        match message:
            case {"do": "start", "worker": int(worker), "slot": int(slot)}:
                self._start(worker, slot)
            case {"do": "kill", "worker": int(worker), "at_once": bool(at_once)} if worker in self.ranks:
                self.ranks[worker].kill_at_s = now_s + (0.0 if at_once else KILL_GRACE_S)
                if at_once:
                    self._actions.kill(worker)
                else:
                    self._actions.ask_to_end(worker)
            case {"do": "agents", "agents": list(agents)}:
                self.agents = [(number, [(*place,) for place in places]) for number, places in agents]
            case {
                "do": "generation", "workers": list(workers), "older": older,
                "has_state": bool(has_state), "left_out": dict(left_out), **generation,
            }:  # fmt: skip
                self._generation = {
                    "number": generation["number"],
                    "workers": workers,
                    "older": older or [],
                    "has_state": has_state,
                    "left_out": left_out,
                }
                own = [(rank, worker) for rank, worker in enumerate(workers) if worker in self.ranks]
                for rank, worker in own:
                    self._note(worker, Phase.MEMBER, generation=generation["number"], rank=rank)
                    self._actions.tell_rank(worker, {**generation, "is": "generation", "rank": rank})
                if older is not None:
                    self._actions.tell_driver({"is": "told", "number": generation["number"]})
            case {"do": "settle", "number": int(number), "older": list(older)} if number == self._generation["number"]:
                self._generation["older"] = older
            case {"do": "dismiss", "worker": int(worker)}:
                self._note(worker, Phase.DISMISSED)
                self._actions.tell_rank(worker, {"is": "dismissed"})
            case {"do": "change", "workers": list(workers), "change": int(change), "lost": str(lost)}:
                for worker in workers:
                    self._actions.tell_rank(worker, {"is": "change", "change": change, "lost": lost})
            case {"do": "end", **more}:
                self.end(now_s, grace_s=more.get("grace_s", KILL_GRACE_S))

    def hear_rank(self, worker: int, message: Mapping[str, Any]) -> None:
        """It asks for something."""
        match message:
            case {"ask": "join", "has_state": bool(has_state), "attendee": dict(attendee)}:
                self._note(worker, Phase.WAITING, has_state=has_state, attendee=attendee)
                if self.ends:  # there will be nobody to train with
                    self._actions.kill(worker)
                asked = {"is": "joined", "worker": worker, "has_state": has_state, "attendee": attendee}
                self._actions.tell_driver(asked)
            case {"ask": "patience", "seconds": float(seconds)} if worker in self.ranks:
                self.ranks[worker].patience_s = seconds
                self._ask_patience(worker, seconds)
            case {"ask": "finished"}:
                self._note(worker, Phase.FINISHED)
                self._actions.tell_driver({"is": "finished", "worker": worker})

    def rank_ended(self, worker: int, end: RankEnd) -> None:
        """A process is there no more."""
        del self.ranks[worker]
        self._tell_ended(worker, end)

    def _ask_patience(self, worker: int, seconds: float) -> None:
        if seconds:
            self._actions.tell_driver({"is": "patient", "worker": worker, "seconds": seconds})

    def _start(self, worker: int, slot: int) -> None:
        try:
            self._actions.start_rank(worker, slot)
        except OSError as err:
            self._tell_ended(worker, RankEnd(exit_code=127, reason=str(err)))
        else:
            self.ranks[worker] = Progress(slot=slot)

    def _tell_ended(self, worker: int, end: RankEnd) -> None:
        told = {"is": "ended", "worker": worker, "exit_code": end.exit_code, "reason": end.reason}
        self._actions.tell_driver(told)

    def _note(
        self,
        worker: int,
        phase: Phase,
        **progress: Any,  # Any: attributes of Progress
    ) -> None:
        if (found := self.ranks.get(worker)) is not None:
            found.phase = phase
            for name, value in progress.items():
                setattr(found, name, value)
