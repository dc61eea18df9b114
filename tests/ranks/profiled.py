"""Jobs that record themselves. Started by test_job_recorder.py."""

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from conformance.training import main
from fakes import recordings
from rank_jobs import cases
from torch import nn

import sirtaki.torch as hvd
from sirtaki.analysis.alignment import OffsetSource, align
from sirtaki.analysis.recording import Detail, Holds, RecordedIteration, Recording
from sirtaki.analysis.recording import read_folder as read
from sirtaki.autotune.model.replayer import Phase
from sirtaki.comm import recorder
from sirtaki.profiler import profile

STEPS = 8


def common_folder() -> Path:
    """Return a folder that all ranks share. Collective."""
    made = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    return Path(hvd.broadcast_object(made, name="folder")) / "recorded"


def model_of(width: int = 16) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def optimizer_of(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **options
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    batches = torch.utils.data.DataLoader(torch.ones(4 * steps, 8), batch_size=4)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        hvd.allreduce(loss.detach(), name="loss")


def recorded(folder: Path) -> Recording:
    """Return the recording of all ranks, on each rank. Collective."""
    hvd.barrier()
    found = read(folder)
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder.parent)
    return found


def an_iteration_is_whole(one: RecordedIteration) -> None:
    assert len(one.ready) == 4
    assert one.copies
    assert one.units
    for unit in one.units:
        assert one.begin_s < unit.issue_s <= unit.done_s < one.end_s
    for ready in one.ready:
        assert one.begin_s < ready.ready_s <= max(unit.issue_s for unit in one.units)


def all_ranks_record_the_same_units() -> None:
    folder, model = common_folder(), model_of()
    optimizer = optimizer_of(model)
    with profile(folder, iterations=5):
        train(model, optimizer, 13)
    assert recorder.current is None
    found = recorded(folder)
    assert found.problems == ()
    for one in (one for rank in found.ranks.values() for one in rank.iterations):
        assert one.beside_s is not None
        assert one.beside_s >= 0.0
    assert sorted(found.ranks) == list(range(hvd.size()))
    assert len(found.common_iterations) == 8  # three of them with operators suffice
    assert len(found.usual_iterations) == 5
    assert not any(one.slowed for one in found.ranks[0].iterations if one.number in found.usual_iterations)
    (buffer,) = found.job.buffers
    assert buffer.ranks == tuple(range(hvd.size()))
    for place in range(8):
        steps = [rank.iterations[place] for rank in found.ranks.values()]
        units = [{unit.unit: unit for unit in step.units} for step in steps]
        assert units[0].keys() == units[-1].keys()
        covered = sorted((unit.start, unit.stop) for unit in units[0])
        assert covered[0][0] == 0
        assert covered[-1][1] == buffer.layout.numel
        for unit in units[0]:  # all ranks of this host have one clock, and a unit is a barrier
            done_s = min(of_rank[unit].done_s for of_rank in units)
            assert max(of_rank[unit].issue_s for of_rank in units) <= done_s
        for step in steps:
            an_iteration_is_whole(step)
            assert [one.name for one in step.collectives if one.kind == "ALLREDUCE"] == ["allreduce.loss"]


def operators_follow_each_other_and_phases_are_known() -> None:
    folder, model = common_folder(), model_of()
    optimizer = optimizer_of(model)
    with profile(folder, iterations=2, edges=True):
        train(model, optimizer)
    for rank in recorded(folder).ranks.values():
        assert rank.detail is Detail.OPERATORS
        assert rank.clock_error_s < 1e-3
        assert [step.slowed for step in rank.iterations] == [True, True, False, False]
        for step in rank.iterations:
            phases = [span.phase for span in step.spans]
            assert phases == [Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
            assert all(before.end_s <= after.begin_s + 1e-5 for before, after in pairwise(step.spans))
            own = [one for one in step.operators if one.lane == 0]
            assert all(before.end_s <= after.begin_s for before, after in pairwise(own))
            by_name = {one.name: one for one in own}
            assert by_name["aten::linear"].phase is Phase.FORWARD
            assert "AddmmBackward0" in {
                step.operators[place].name for one in own if one.name == "AccumulateGrad" for place in one.after
            }
            assert by_name["AddmmBackward0"].phase is Phase.BACKWARD
            assert by_name["AccumulateGrad"].phase is Phase.BACKWARD
            # A gradient is ready while autograd accumulates it, or right afterwards, because clocks are mapped.
            backward = next(span for span in step.spans if span.phase is Phase.BACKWARD)
            assert all(backward.begin_s - 1e-4 < ready.ready_s < backward.end_s + 1e-2 for ready in step.ready)


def memory_is_recorded_of_one_step_and_modules_of_all_operators() -> None:
    folder, model = common_folder(), model_of()
    optimizer = optimizer_of(model)
    with profile(folder, iterations=2):
        train(model, optimizer)
    for rank in recorded(folder).ranks.values():
        memory = rank.memory
        assert memory is not None
        assert (memory.iteration, memory.devices, memory.batch) == (rank.iterations[0].number, ("cpu",), 4)
        assert [one.name for one in rank.modules] == ["", "0", "1", "2"]
        n_bytes = Counter[Holds]()
        for one in memory.allocations:
            n_bytes[one.holds] += one.n_bytes
        parameters = sum(one.nbytes for one in model.parameters())
        assert n_bytes[Holds.GRADIENTS] == parameters, (n_bytes, parameters)
        assert n_bytes[Holds.FLAT_BUFFERS] >= parameters
        assert n_bytes[Holds.ACTIVATIONS] >= 4 * (16 + 4) * 4
        for step in rank.iterations:  # includes iterations that torch.profiler did not record
            of = {(one.name, one.phase): one.module for one in step.operators}
            assert of["aten::relu", Phase.FORWARD] == of["ReluBackward0", Phase.BACKWARD] == 2
            assert of["aten::square", Phase.FORWARD] == -1


def units_alone_are_recorded_without_operators() -> None:
    folder, model = common_folder(), model_of()
    optimizer = optimizer_of(model)
    with profile(folder, iterations=2, operators=False):
        train(model, optimizer)
    for rank in recorded(folder).ranks.values():
        assert rank.detail is Detail.UNITS
        assert rank.memory is None
        for step in rank.iterations:
            an_iteration_is_whole(step)
            assert step.operators == ()
            assert [span.phase for span in step.spans] == [Phase.BACKWARD, Phase.UPDATE]


def what_there_is_is_written_if_training_ends_early() -> None:
    folder, model = common_folder(), model_of()
    optimizer = optimizer_of(model)
    with profile(folder, iterations=50):
        train(model, optimizer)
    found = recorded(folder)
    assert len(found.common_iterations) >= 2
    assert "fewer iterations than the 50 wanted" in found.problems[0]


def buffers_of_two_optimizers_are_told_apart() -> None:
    folder, models = common_folder(), [model_of(), model_of(32)]
    optimizers = [optimizer_of(model) for model in models]
    with profile(folder, iterations=2, operators=False):
        for _ in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()
    found = recorded(folder)
    numbers = {buffer.number for buffer in found.job.buffers}
    assert len(numbers) == 2
    for rank in found.ranks.values():
        for step in rank.iterations:
            assert {unit.unit.buffer for unit in step.units} == numbers
            assert len(step.ready) == 8


def a_buffer_of_some_ranks_is_known_to_all() -> None:
    folder, model, own = common_folder(), model_of(), model_of(32)
    some = hvd.add_process_set([0, 1])
    optimizers = [(model, optimizer_of(model))]
    if hvd.rank() < 2:
        optimizers.append((own, optimizer_of(own, process_set=some)))
    with profile(folder, iterations=2, operators=False):
        for _ in range(STEPS):
            for trained, optimizer in optimizers:
                optimizer.zero_grad()
                trained(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()
    del optimizers, optimizer, trained
    hvd.remove_process_set(some)
    found = recorded(folder)
    assert found.problems == ()
    assert {buffer.ranks for buffer in found.job.buffers} == {(0, 1), tuple(range(hvd.size()))}


def an_error_put_into_a_clock_is_recovered() -> None:
    # Load on the machine during a recording makes the mapping of clocks less accurate.
    assert any(an_error_is_recovered() for _ in range(3))


def an_error_is_recovered() -> bool:
    """Return whether an injected clock error is recovered. All ranks read the same recording."""
    folder, model = common_folder(), model_of()
    optimizer = optimizer_of(model)
    with profile(folder, iterations=10, operators=False):
        train(model, optimizer, 14)
    true = recorded(folder)
    placement = list(true.job.placement)
    placement[1] = replace(placement[1], clock="another", host=1)
    job, own = replace(true.job, placement=tuple(placement)), true.ranks[1]
    for by_s, drift in ((0.05, 20e-6), (-0.05, -20e-6)):
        told = recordings.shifted(own, by_s=by_s, drift=drift)
        aligned = align(replace(true, job=job, ranks={**true.ranks, 1: told}))
        line = aligned.lines[1]
        assert line.known is OffsetSource.UNITS
        for one, other in zip(told.iterations, own.iterations, strict=True):
            for there, here in zip(one.units, other.units, strict=True):
                if abs(aligned.at(1, there.done_s) - here.done_s) > line.error_s:
                    return False
    return True


def a_script_may_use_the_profiler_itself() -> None:
    folder, model = common_folder(), model_of()
    optimizer = optimizer_of(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), profile(folder, iterations=2):
        train(model, optimizer)
    found = recorded(folder)
    assert found.problems == ()
    assert {rank.detail for rank in found.ranks.values()} == {Detail.UNITS}


SUBSETS = [a_buffer_of_some_ranks_is_known_to_all]
CASES = cases(globals())


if __name__ == "__main__":
    main(SUBSETS if "SIRTAKI_TEST_SUBSETS" in os.environ else CASES)
