"""What follows for hosts when a process or a host is lost, and how it is told."""

from collections.abc import Callable, Sequence

from .endings import Endings
from .host_pool import HostPool
from .news import with_ranks
from .policy import OnFailure, Policy
from .roll import Roll
from .workers import Phase, RankEnd, Worker


class Losses:
    """Of one job; each is told in a line."""

    def __init__(self, policy: Policy, pool: HostPool, roll: Roll, endings: Endings) -> None:
        self._policy, self._pool, self._roll, self._endings = policy, pool, roll, endings

    def of_worker(self, worker: Worker, end: RankEnd, now_s: float, *, may_start: Callable[[], bool]) -> str:
        """A process has failed, which is on the roll no more; its host may be left out.

        Args:
            worker: see above.
            end: how.
            now_s: the time.
            may_start: whether another process may take its place, as things are then.
        """
        self._endings.fail(worker.label, end)
        self._endings.ended_badly = True
        if worker.verdict:
            text = worker.verdict
        elif worker.is_leaving:
            text = f"{end.text}; it was to leave"
        else:
            text = end.text
        settled = worker.phase is Phase.MEMBER and now_s - worker.since_s >= self._policy.settled_s
        if settled:
            self._pool.clear(worker.host)
        drop = self._policy.on_failure is OnFailure.DROP_HOST
        if not drop and not settled and (worker.generation == 0 or not end.is_signal):
            drop = self._pool.strike(worker.host)
        usable = self._pool.usable
        if drop and worker.host in usable:
            what = self._left_out(worker.host, now_s)
        elif worker.slot < usable.get(worker.host, 0) and may_start():
            what = "; replaced in place"
        else:
            what = ""
        return f"{worker.label} {text}{what}{self._go_on()}"

    def of_host(self, host: str, lost: Sequence[Worker], why: str, now_s: float) -> str:
        """An agent is gone, and with it these processes of its host, which are on the roll no more."""
        self._endings.host_problem = problem = f"host {host} is lost ({why})"
        self._endings.fail(f"host {host}", RankEnd(exit_code=1, reason=why))
        what = self._left_out(host, now_s) if host in self._pool.usable else ""
        return f"{problem}{with_ranks(lost)}{what}{self._go_on()}"

    def _left_out(self, host: str, now_s: float) -> str:
        cooldown_s = self._pool.drop(host, now_s)
        how_long = "from now on" if cooldown_s is None else f"for {cooldown_s:.0f} s"
        return f"; host {host} is left out {how_long}"

    def _go_on(self) -> str:
        usable = self._pool.usable
        left = len([worker for worker in self._roll.survivors if worker.host in usable])
        return f", {left} go{'es' * (left == 1)} on" if left else ""
