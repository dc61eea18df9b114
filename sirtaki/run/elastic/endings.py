"""When a job whose ranks come and go has ended, and with which exit code."""

from collections.abc import Mapping

from .actions import End
from .policy import Policy
from .roll import Roll
from .workers import Phase, RankEnd


class Endings:
    """Remembers what has gone wrong since the present generation began, and says when that is the end.

    Attributes:
        failure: what has failed first, and how; None = nothing.
        ended_well, ended_badly: before the first generation a process has.
        host_problem: the newest, for the user.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.failure: tuple[str, RankEnd] | None = None
        self.ended_well = self.ended_badly = False
        self.host_problem = ""
        self._short_since_s: float | None = None

    def begin(self) -> None:
        """A generation begins."""
        self.failure, self.host_problem = None, ""

    def fail(self, label: str, end: RankEnd) -> None:
        """Something has failed."""
        self.failure = self.failure or (label, end)

    def reached(self, roll: Roll, *, agents: Mapping[str, bool], slots: int) -> End | None:
        """The end, if nobody is left, or all have done what they can."""
        if roll.generation:
            if roll.of_generation(Phase.MEMBER, Phase.FINISHED):
                return None
            if roll.has_succeeded:
                return End(exit_code=0)
            if not roll.of_generation(Phase.WAITING) and self.failure is not None:
                return self._failed("all ranks of the job have failed")
        elif self.host_problem and self._policy.hosts_stay and slots < self._policy.start_ranks:
            return End(
                exit_code=1,
                text=f"{self._policy.start_ranks} ranks are to begin, and the hosts that are left have {slots} slots: "
                f"mend that{f', or give -np {slots}' if slots >= self._policy.min_ranks else ''}",
            )
        elif not roll.workers:
            if self.ended_badly:
                return self._failed("no rank has come as far as to join the job")
            if self.ended_well:
                return End(exit_code=0)
            if self.host_problem and not agents and not slots:
                return End(exit_code=1, text=f"{self.host_problem}; no host is left")
        return None

    def without_state(self) -> End:
        """Nobody is left who holds the state of the job."""
        return self._failed("nobody is left who holds the state of the job")

    def outvoted(self) -> End:
        """Those that cannot be reached may have a driver of their own."""
        return self._failed(
            "too many ranks cannot be reached, and may go on without this side (--on-driver-loss go-on)"
        )

    def in_vain(self, roll: Roll, now_s: float) -> End | None:
        """The end, if ranks have waited for others for too long."""
        if roll.is_running or roll.present(Phase.FINISHED):
            self._short_since_s = None
            return None
        self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
        if now_s - self._short_since_s <= self._policy.timeout_s:
            return None
        least = self._policy.min_ranks if roll.generation else self._policy.start_ranks
        came = len(roll.candidates(self._policy.max_ranks))
        problem = f"; {self.host_problem}" if self.host_problem else ""
        return End(
            exit_code=1,
            text=f"{came} of at least {least} ranks came within {self._policy.timeout_s:g} s; --elastic-timeout waits "
            f"longer, --min-np goes on with fewer{problem}",
        )

    def _failed(self, text: str) -> End:
        if self.failure is None:
            return End(exit_code=1, text=text)
        label, end = self.failure
        return End(exit_code=end.exit_code or 1, text=f"{text}; the first that failed was {label}: it {end.text}")
