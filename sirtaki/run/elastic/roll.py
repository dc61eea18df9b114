"""The processes of a job whose ranks come and go, and its present generation: facts and questions, no decisions."""

from collections.abc import Iterator, Mapping, Sequence

from .workers import Phase, Worker, seniority

_NOBODY = 0  # no process has this number


class Roll:
    """Who is there.

    Attributes:
        workers: by number; who has ended is not among them.
        generation: the present one's number; 0 = none has begun.
        members: of the present generation, by rank, dead ones too.
        has_succeeded: a member of the present generation has done its work.
        has_state: somebody has said that it holds the job's state.
    """

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.has_succeeded = False
        self.has_state = False
        self._numbers = 0
        self._places: dict[int, tuple[str, int]] = {}
        self._ranks: dict[int, int] = {}

    def add(self, host: str, slot: int, now_s: float) -> Worker:
        """A new process."""
        self._numbers += 1
        self._places[self._numbers] = host, slot
        worker = self.workers[self._numbers] = Worker(number=self._numbers, host=host, slot=slot, since_s=now_s)
        return worker

    def take_over(self, workers: Sequence[Worker], generation: int, members: Sequence[int]) -> None:
        """Goes on where another driver has been lost; see `JobMembers.take_over`."""
        for worker in workers:
            self.workers[worker.number] = worker
            self._places[worker.number] = worker.host, worker.slot
        self._numbers = max([0, *self.workers, *members])
        self.has_state = any(worker.has_state for worker in workers)
        there = [number for number in members if number in self.workers]
        # Who had not been told of the generation when the driver was lost never was in it.
        told = [number for number in there if self.workers[number].generation == generation]
        for rank, number in enumerate(members):
            if number in self.workers:
                self.workers[number].generation, self.workers[number].rank = generation, rank
                self._ranks[number] = rank
        self.generation = generation
        self.members = tuple(number if number in told else _NOBODY for number in members)
        self.has_succeeded = bool(self.of_generation(Phase.FINISHED))

    def begin(self, members: list[Worker], now_s: float) -> None:
        """The next generation, with these members in the order of their ranks."""
        self.generation += 1
        self.members = tuple(worker.number for worker in members)
        self.has_succeeded = False
        for rank, worker in enumerate(members):
            worker.rank, worker.generation = rank, self.generation
            self._ranks[worker.number] = rank
            worker.enter(Phase.MEMBER, now_s)

    def label(self, number: int) -> str:
        """How a process, which may have ended, is called in the output: its rank, as far as it has one."""
        host, slot = self._places.get(number, ("?", 0))
        return str(self._ranks.get(number, f"{host}:{slot}"))

    def is_of(self, host: str, number: int) -> bool:
        """Whether the process is or was there."""
        return self._places.get(number, ("", 0))[0] == host

    def place(self, number: int) -> str:
        """Its host and slot as a name for a folder."""
        host, slot = self._places.get(number, ("unknown", 0))
        return f"{host}.{slot}"

    def present(self, *phases: Phase) -> list[Worker]:
        """Processes in one of these phases."""
        return [worker for worker in self.workers.values() if worker.phase in phases]

    def of_generation(self, *phases: Phase) -> list[Worker]:
        """Members of the present generation that are there, in one of these phases; by rank."""
        found = (self.workers[number] for number in self.members if number in self.workers)
        return [worker for worker in found if worker.phase in phases]

    @property
    def survivors(self) -> list[Worker]:
        """Members that go on."""
        return [worker for worker in self.of_generation(Phase.MEMBER, Phase.WAITING) if not worker.is_leaving]

    @property
    def wanted(self) -> list[Worker]:
        """Processes that are, or may become, members."""
        active = self.present(Phase.STARTING, Phase.WAITING, Phase.MEMBER)
        return [worker for worker in active if not worker.is_leaving]

    def mark_leaving(self, usable: Mapping[str, int], most: int | None) -> None:
        """Says of each process whether it is to leave.

        Args:
            usable: slots by host.
            most: how many ranks there may be; the youngest leave where hosts have come back before those who replace
                their ranks were there. None = any number.
        """
        for worker in self.present(Phase.STARTING, Phase.WAITING, Phase.MEMBER):
            worker.is_leaving = worker.slot >= usable.get(worker.host, 0)
        for worker in sorted(self.wanted, key=seniority)[most:] if most is not None else ():
            worker.is_leaving = True

    @property
    def is_running(self) -> bool:
        """Members of the present generation have not asked for another one."""
        return bool(self.of_generation(Phase.MEMBER))

    @property
    def newcomers(self) -> list[Worker]:
        """Who waits, and was in no member of the present generation."""
        waiting = self.present(Phase.WAITING)
        return [worker for worker in waiting if worker.number not in self.members and not worker.is_leaving]

    @property
    def is_diminished(self) -> bool:
        """A member of the present generation has died, or is to leave while others stay."""
        there = self.of_generation(*Phase)
        if len(there) < len(self.members):
            return True
        leave = any(worker.is_leaving for worker in there)
        return leave and any(worker.phase is not Phase.STARTING for worker in self.wanted)

    def candidates(self, most: int | None) -> list[Worker]:
        """Of those who wait, who would be the members of the next generation, at most so many.

        Who is to leave stays while nobody else holds the job's state: it hands it over first.
        """
        waiting = self.present(Phase.WAITING)
        wanted = [worker for worker in waiting if not worker.is_leaving]
        if any(worker.has_state for worker in wanted):
            return wanted
        leaving = sorted((worker for worker in waiting if worker.is_leaving and worker.has_state), key=seniority)
        if most is not None:
            leaving = leaving[: max(1, most - len(wanted))]
            wanted = wanted[: most - len(leaving)]
        return wanted + leaving

    def dismissible(self) -> Iterator[Worker]:
        """Those who are to leave and wait to be told so."""
        has_heir = any(worker.has_state for worker in self.wanted)
        for worker in self.present(Phase.WAITING):
            if worker.is_leaving and (has_heir or not worker.has_state):
                yield worker

    def free_slots(self, host: str, slots: int) -> list[int]:
        """Places where no process is."""
        taken = {worker.slot for worker in self.workers.values() if worker.host == host}
        return [slot for slot in range(slots) if slot not in taken]
