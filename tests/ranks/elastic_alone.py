"""Elastic features on one rank: every generation has one member. Started by test_generations.py."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance.training import main
from rank_jobs import cases

import sirtaki.torch as hvd
from sirtaki.comm.control.members import Member, Membership
from sirtaki.engine import generations, job
from sirtaki.engine.membership import Change, Dismissed, Generation
from sirtaki.errors import NotInitializedError
from sirtaki.torch.exceptions import HostsUpdatedInterrupt


class Lone:
    """A membership with this process as the only member."""

    changes = Change(0)
    dismissed = False
    asked: list[tuple[int, bool]]

    def __init__(self) -> None:
        self.asked = []

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        self.asked.append((after, has_state))
        if self.dismissed:
            raise Dismissed("its host is drained")
        self.changes = Change(0)
        members = (Member(node="here", has_state=has_state),)
        return Generation(rank=0, membership=Membership(generation=after + 1, members=members, name="job", secret=""))

    def change(self) -> Change:
        return self.changes

    def on_loss(self, report: Callable[[str], object]) -> None:
        pass

    def finished(self) -> None:
        pass


def play(train: Callable[[Any], Any], **values: Any) -> tuple[Any, hvd.elastic.ObjectState]:
    state = hvd.elastic.ObjectState(**values)
    return hvd.elastic.run(train)(state), state


def a_change_of_hosts_is_told_at_the_next_commit_and_keeps_what_was_done_since() -> None:
    calls: list[int] = []

    def train(state: Any) -> str:
        calls.append(state.step)
        if len(calls) == 1:
            lone.changes = Change.ADDED
            state.commit()
        return "done"

    before = job.current().elastic.number  # type: ignore[union-attr]

    def raise_later(state: Any) -> str:
        state.step += 1
        return train(state)

    result, state = play(raise_later, step=0)
    assert (result, calls, state.step) == ("done", [1, 2], 2)
    assert job.current().elastic.number == before + 1  # type: ignore[union-attr]
    assert lone.asked[-1] == (before, True)


def looking_for_changes_without_saving_loses_nothing_either() -> None:
    def train(state: Any) -> int:
        state.step += 1
        if state.step == 1:
            lone.changes = Change.ADDED
            state.check_host_updates()
        return int(state.step)

    assert play(train, step=0)[0] == 2


def a_failure_goes_back_to_the_last_commit_and_its_random_numbers() -> None:
    drawn: list[float] = []

    def train(state: Any) -> int:
        if not drawn:
            state.step = 1
            state.commit()
            drawn.append(random.random() + torch.rand(1).item())
            state.step = 2
            raise hvd.HorovodInternalError("as if a rank were lost")
        drawn.append(random.random() + torch.rand(1).item())
        return int(state.step)

    assert play(train, step=0)[0] == 1
    assert drawn[0] == drawn[1]


def a_step_that_a_failure_interrupts_is_unscaled_again() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler, calls = torch.amp.GradScaler("cpu", init_scale=64.0), []

    def train(state: Any) -> list[float]:
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor([[1.0, 2.0]])).sum()).backward()
        scaler.unscale_(optimizer)
        calls.append(state.step)
        if len(calls) == 1:
            raise hvd.HorovodInternalError("as if a rank were lost")
        assert model.weight.grad is not None
        gradient: list[float] = model.weight.grad.flatten().tolist()
        scaler.step(optimizer)
        scaler.update()
        return gradient

    assert play(train, step=0)[0] == [1.0, 2.0]
    optimizer.close()


def callbacks_are_called_after_the_new_beginning_and_may_fail() -> None:
    said: list[tuple[int, int]] = []

    def callback() -> None:
        said.append((hvd.size(), job.current().elastic.number))  # type: ignore[union-attr]
        if len(said) == 1:
            raise hvd.HorovodInternalError("as if a rank were lost again")

    state = hvd.elastic.ObjectState(step=0)
    state.register_reset_callbacks([callback])

    @hvd.elastic.run
    def train(state: Any) -> None:
        if not said:
            raise hvd.HorovodInternalError("as if a rank were lost")

    train(state)
    assert said[1][1] == said[0][1] + 1


def states_of_the_scripts_own_are_saved_restored_and_shared() -> None:
    calls: list[str] = []

    class Own(hvd.elastic.State):
        def save(self) -> None:
            calls.append("save")

        def restore(self) -> None:
            calls.append("restore")

        def sync(self) -> None:
            calls.append("sync")

    @hvd.elastic.run
    def train(state: Own) -> None:
        if "restore" not in calls:
            state.commit()
            raise hvd.HorovodInternalError("as if a rank were lost")

    train(Own(bcast_object=lambda value: value, get_rank=hvd.rank))
    assert calls == ["sync", "save", "restore", "sync"]


def values_are_shared_by_what_the_script_gives() -> None:
    shared: list[Any] = []
    state = hvd.elastic.ObjectState(bcast_object=lambda value: shared.append(value) or {"step": 7}, step=0)
    state.sync()
    assert (state.step, shared) == (7, [{"step": 0}])


def the_variables_of_a_rank_are_those_of_its_generation() -> None:
    os.environ["HOROVOD_RANK"] = os.environ["HOROVOD_SIZE"] = "none"

    def train(state: Any) -> None:
        if os.environ["HOROVOD_SIZE"] == "none":
            raise hvd.HorovodInternalError("as if a rank were lost")

    play(train)
    assert [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "ELASTIC")] == ["0", "1", "1"]
    assert (hvd.rank(), hvd.size()) == (0, 1)


def a_process_set_that_does_not_fit_says_so_when_it_is_used() -> None:
    hvd.shutdown()
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] cannot be used, because the job has only 1 ranks"):
        hvd.allreduce(torch.ones(1), process_set=pair)
    assert pair.included() is None
    inside: list[Any] = []

    def train(state: Any) -> None:
        if not inside:
            inside.append(pair)
            raise hvd.HorovodInternalError("as if a rank were lost")
        with pytest.raises(ValueError, match="cannot be used, because the job has only"):  # raised during training
            hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)], lr=0.1), process_set=pair)

    play(train)


def a_reset_of_the_scripts_own_may_end_everything_and_begin_anew() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    generations: list[int] = []

    def train(state: Any) -> None:
        generations.append(job.current().elastic.number)  # type: ignore[union-attr]
        if len(generations) == 1:
            raise hvd.HorovodInternalError("as if a rank were lost")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    def reset() -> None:
        hvd.shutdown()
        hvd.init()

    hvd.elastic.run_fn(train, reset)(hvd.elastic.ObjectState())
    assert generations[1] == generations[0] + 2


def handles_of_a_generation_end_with_it() -> None:
    handles: list[int] = []

    def train(state: Any) -> None:
        if not handles:
            handles.append(hvd.allreduce_async(torch.ones(1), name="never asked for"))
            raise hvd.HorovodInternalError("as if a rank were lost")

    play(train)
    assert hvd.synchronize(handles[0]) is None


def an_optimizer_goes_on_or_says_why_it_cannot() -> None:
    model = torch.nn.Linear(2, 1)
    outside = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inside: list[torch.optim.Optimizer] = []
    model(torch.ones(1, 2)).sum().backward()

    def train(state: Any) -> None:
        if not inside:
            inside.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
            raise hvd.HorovodInternalError("as if a rank were lost")
        assert model.weight.grad is None  # it belonged to an iteration that was undone
        for optimizer in (outside, *inside):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    play(train)
    for optimizer in (outside, *inside):
        optimizer._detach("of old")  # type: ignore[attr-defined]
        with pytest.raises(NotInitializedError, match="of old"):
            optimizer.step()
        optimizer.zero_grad()


def who_is_not_wanted_any_more_ends_with_0() -> None:
    def train(state: Any) -> None:
        lone.dismissed = True
        lone.changes = Change.REMOVED
        state.commit()

    try:
        with pytest.raises(SystemExit) as end:
            play(train)
        assert end.value.code == 0
        assert not hvd.is_initialized()
    finally:
        lone.dismissed = False
    hvd.init()


def only_a_removal_needs_no_sync() -> None:
    said = []
    for change in (Change.ADDED, Change.REMOVED, Change.ADDED | Change.REMOVED):
        lone.changes = change
        with pytest.raises(HostsUpdatedInterrupt) as interrupt:
            hvd.elastic.ObjectState().commit()
        said.append(interrupt.value.skip_sync)
    lone.changes = Change(0)
    assert said == [False, True, False]


CASES = cases(globals())

if __name__ == "__main__":
    lone = Lone()
    generations.register(lambda: lone)
    main(CASES)
