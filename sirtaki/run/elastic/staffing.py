"""Who is started and who is sent away: agents and ranks follow the hosts that may be used."""

from .actions import Action, Dismiss, KillRank, StartAgent, StartRank, StopAgent
from .host_pool import HostPool
from .policy import Policy
from .roll import Roll
from .workers import Phase


class Staffing:
    """Of one job.

    Attributes:
        agents: by host; False = being started.
    """

    def __init__(self, policy: Policy, pool: HostPool, roll: Roll) -> None:
        self._policy, self._pool, self._roll = policy, pool, roll
        self.agents: dict[str, bool] = {}

    def send_away(self, now_s: float) -> list[Action]:
        """For those for whom there is no room any more, and for agents that have no ranks any more."""
        actions: list[Action] = []
        usable = self._pool.usable
        self._roll.mark_leaving(usable, self._policy.max_ranks)
        for worker in self._roll.present(Phase.STARTING):
            if worker.is_leaving:
                actions.append(KillRank(worker=worker.number, host=worker.host, at_once=False))
                worker.enter(Phase.DISMISSED, now_s)
        for worker in list(self._roll.dismissible()):
            actions.append(Dismiss(worker=worker.number, host=worker.host))
            worker.enter(Phase.DISMISSED, now_s)
        for worker in self._roll.present(Phase.DISMISSED):
            if now_s - worker.since_s > self._policy.leave_s:
                actions.append(KillRank(worker=worker.number, host=worker.host, at_once=True))
                worker.since_s = now_s
        for host in [host for host in self.agents if host not in usable]:
            if all(worker.host != host for worker in self._roll.workers.values()):
                del self.agents[host]
                actions.append(StopAgent(host=host))
        return actions

    def take_on(self, now_s: float) -> list[Action]:
        """Agents and ranks where there is room."""
        actions: list[Action] = []
        usable, most = self._pool.usable, self._policy.max_ranks
        room = sum(usable.values()) if most is None else most - len(self._roll.wanted)
        for host, slots in usable.items():
            free = self._roll.free_slots(host, slots)[: max(0, room)]
            if free and host not in self.agents:
                self.agents[host] = False
                actions.append(StartAgent(host=host))
            room -= len(free)
            for slot in free if self.agents.get(host) else ():
                worker = self._roll.add(host, slot, now_s)
                actions.append(StartRank(worker=worker.number, host=host, slot=slot))
        return actions
