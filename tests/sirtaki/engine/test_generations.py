"""A process goes from generation to generation, past those that do not live to begin, until there is none for it."""

import pytest

from sirtaki.comm.control.mesh_rendezvous import Meeting
from sirtaki.engine import generations
from sirtaki.engine.generations import Generations
from sirtaki.engine.membership import Change, Dismissed, Generation, Member, register
from sirtaki.errors import CommError, LaunchError, PeerLostError
from sirtaki.settings import Settings


class Membership:
    """Answers `join` with what it is given: generations of one, or errors."""

    def __init__(self, *answers: bool | CommError) -> None:
        self.answers, self.asked = list(answers), list[tuple[int, bool]]()
        self.n_finished = 0

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        self.asked.append((after, has_state))
        answer = self.answers.pop(0)
        if isinstance(answer, CommError):
            raise answer
        member = Member(host="here", slot=0, is_new=answer)
        return Generation(number=after + 1, members=(member,), meeting=Meeting(rank=0, size=1))

    def change(self) -> Change:
        return Change.ADDED

    def finished(self) -> None:
        self.n_finished += 1


def test_a_rank_says_where_it_comes_from() -> None:
    membership = Membership(True, False)
    elastic = Generations(membership)
    assert not elastic.in_step
    elastic.meet_next(Settings()).free()
    assert (elastic.number, elastic.in_step) == (1, True)
    elastic.has_state = True
    elastic.meet_next(Settings()).free()
    assert (elastic.number, elastic.in_step) == (2, True)
    assert membership.asked == [(0, False), (1, True)]
    assert elastic.change() is Change.ADDED
    elastic.finished()
    assert membership.n_finished == 1


def test_a_generation_that_loses_a_member_before_all_have_met_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met, really = list[int](), generations.meet

    def meet(meeting: Meeting, **how: object) -> object:
        met.append(1)
        if len(met) < 3:
            raise PeerLostError("a member has ended")
        return really(meeting, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(generations, "meet", meet)
    elastic = Generations(Membership(True, True, True))
    elastic.meet_next(Settings()).free()
    assert elastic.number == 3


def test_where_there_is_no_next_generation_it_is_no_failure_of_communication() -> None:
    with pytest.raises(LaunchError, match=r"no generation after 0.*too few hosts"):
        Generations(Membership(CommError("too few hosts"))).meet_next(Settings())


def test_who_is_dismissed_has_not_finished_the_job() -> None:
    membership = Membership(Dismissed("its host is drained"))
    elastic = Generations(membership)
    with pytest.raises(Dismissed):
        elastic.meet_next(Settings())
    elastic.finished()
    assert membership.n_finished == 0


def test_who_is_registered_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "_of_process", None)
    monkeypatch.setattr(generations.process_end, "_at_success", [])
    try:
        register(lambda: None)
        assert generations.of_this_process(Settings()) is None
        register(lambda: Membership(True))
        assert generations.of_this_process(Settings()) is generations.of_this_process(Settings()) is not None
        assert len(generations.process_end._at_success) == 1
    finally:
        register(None)
