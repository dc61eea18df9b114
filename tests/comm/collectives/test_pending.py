"""What a rank has pending, whoever submits it and whoever runs rounds."""

import pytest
import torch

from sirtaki.comm.collectives.engine import EagerWork, Pending
from sirtaki.comm.collectives.operations import Kind, Signature
from sirtaki.errors import CommError, MismatchError


def work(name: str) -> EagerWork:
    tensors = [torch.zeros(2)]
    return EagerWork(Signature.of(tensors, name=name, kind=Kind.ALLREDUCE, op="sum"), tensors)


def test_a_name_is_under_way_once() -> None:
    pending = Pending("")
    pending.add(work("a"), wake=False)
    with pytest.raises(ValueError, match=r"same name as another tensor .*'a'"):
        pending.add(work("a"), wake=False)
    assert (len(pending), "a" in pending, "b" in pending) == (1, True, False)


def test_what_was_refused_elsewhere_fails_when_it_is_submitted_here() -> None:
    pending = Pending("")
    pending.refuse("late", "the ranks disagree")
    late = work("late")
    pending.add(late, wake=False)
    assert "late" not in pending
    with pytest.raises(MismatchError, match="disagree"):
        late.wait(0.0)
    pending.add(work("late"), wake=False)  # owed once
    assert "late" in pending


def test_a_snapshot_holds_what_there_is_and_nothing_is_none() -> None:
    pending = Pending("")
    assert pending.snapshot(0.0) is None
    pending.add(work("a"), wake=False)
    pending.next_name("allreduce")
    there = pending.snapshot(0.0)
    assert there is not None
    assert (list(there.works), there.join, there.closing, there.unnamed) == (["a"], None, False, 1)
    assert [signature.name for signature in there.presence().signatures] == ["a"]
    assert there.presence().joined is None


def test_after_a_join_unnamed_operations_count_as_on_the_rank_that_has_submitted_most() -> None:
    pending = Pending("")
    pending.join((0, 0))
    assert "join()" in str(pending.oldest_wait())
    pending.end_join(7)
    assert pending.oldest_wait() is None
    assert pending.next_name("barrier") == "barrier.noname.8"


def test_who_has_taken_leave_submits_nothing_more_and_what_was_pending_fails() -> None:
    pending = Pending(" of process set 1")
    early = work("early")
    pending.add(early, wake=False)
    assert pending.describe() == "has submitted early of process set 1"
    pending.close()
    with pytest.raises(CommError, match="shut down while"):
        early.wait(0.0)
    with pytest.raises(CommError, match="during shutdown"):
        pending.add(work("later"), wake=False)


def test_why_this_rank_cannot_take_part_is_told_though_it_takes_leave() -> None:
    pending = Pending("")
    unable = EagerWork(Signature(name="unable", kind=Kind.ALLREDUCE, problem="no such rows"), [])
    pending.add(unable, wake=False)
    pending.add(work("able"), wake=False)
    pending.close()
    there = pending.snapshot(0.0)
    assert there is not None
    assert list(there.works) == ["unable"]
    pending.refuse("unable", "Rank 0 cannot take part")
    assert len(pending) == 0
