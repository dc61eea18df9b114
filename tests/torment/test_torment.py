"""Ranks that run random programs train like one process on the joined batch."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from rank_jobs import Launcher
from torment.attached import AttachedReference, attached_programs
from torment.program import Backward, BlockKind, Hook, OptimizerSpec, Program, Step, Wait, ZeroGrad
from torment.reference import Entry, Reference
from torment.strategy import environments_of, programs
from torment.tormentor import BrokenError, Ranks, compare, torment

pytestmark = pytest.mark.filterwarnings("ignore")  # because programs do things of which PyTorch and Sirtaki warn

EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*.json"))


@pytest.fixture(scope="module")
def ranks(launcher: Launcher) -> Iterator[Ranks]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Ranks(4, command=launcher.command_of_one) as started:
        yield started
    torch.set_num_threads(threads)


def draw_and_torment(ranks: Ranks, drawn: SearchStrategy[Program], count: int) -> None:
    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=drawn)
    def train(program: Program) -> None:
        torment(program, ranks)

    train()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_programs_that_once_found_a_fault_train_as_one_process_does(example: Path, ranks: Ranks) -> None:
    program = Program.from_json(example.read_text())
    reference = torment(program, ranks)
    assert reference.played == program, "a part of the example is not legitimate any more"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "count", "setting"),
    [
        (1, 15, ""),
        (2, 80, "overlap_forward=check"),
        (3, 75, ""),
        *(pytest.param(*drawn, marks=pytest.mark.slow) for drawn in ((2, 40, ""), (3, 20, "unused=none"), (4, 20, ""))),
    ],
)
def test_drawn_programs_train_as_one_process_does(world: int, count: int, setting: str, ranks: Ranks) -> None:
    environment = dict([setting.split("=")]) if setting else {}
    draw_and_torment(ranks, programs(world, environment=environment), count)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "count", "environment"),
    [
        (2, 20, {}),
        (3, 10, {"transport": "gloo"}),
        *(
            pytest.param(world, 150, environment, marks=pytest.mark.slow)
            for world in (2, 3, 4)
            for environment in environments_of(world)
        ),
    ],
)
def test_drawn_programs_over_ddp_train_like_one_process(
    world: int, count: int, environment: dict[str, str], ranks: Ranks
) -> None:
    draw_and_torment(ranks, attached_programs(world, environment=environment), count)


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(("world", "count"), [(2, 60)])
@pytest.mark.parametrize("drawn", [programs, attached_programs])
def test_drawn_programs_that_are_compiled_train_as_one_process_does(
    world: int, count: int, drawn: Callable[..., SearchStrategy[Program]], ranks: Ranks
) -> None:
    draw_and_torment(ranks, drawn(world, compiles=True), count)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("world", "environment"),
    [
        pytest.param(world, environment, id=f"{world}-{' '.join(environment.values()) or 'default'}")
        for world in (2, 3, 4)
        for environment in environments_of(world)
    ],
)
def test_many_drawn_programs_train_as_one_process_does(world: int, environment: dict[str, str], ranks: Ranks) -> None:
    draw_and_torment(ranks, programs(world, environment=environment), 280)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_drawn_programs_over_tcp_with_compressed_gradients_train_alike(transport: str, ranks: Ranks) -> None:
    drawn = programs(3, environment={"transport": transport})
    draw_and_torment(ranks, drawn.filter(lambda program: any(spec.lossy for spec in program.optimizers)), 50)


@pytest.mark.lengthy
@seed(0)
@settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(program=programs(3, compiles=True) | programs(3))
def test_programs_survive_json_and_valid_ones_stay_valid(program: Program) -> None:
    assert Program.from_json(program.to_json()) == program
    played = Reference(program).played
    assert Reference(played).played == played


@pytest.mark.lengthy
@seed(0)
@settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(program=attached_programs(3, compiles=True) | attached_programs(3))
def test_programs_over_ddp_survive_json_and_valid_ones_stay_valid(program: Program) -> None:
    assert Program.from_json(program.to_json()) == program
    played = AttachedReference(program).played
    assert AttachedReference(played).played == played


# ── the tormentor sees what is wrong ─────────────────────────────────────────────────────────────────────────────────

TRAINED = Program(
    ranks=2,
    blocks=(BlockKind.LINEAR,),
    optimizers=(OptimizerSpec(rule="sgd", parameters=("0.weight", "0.bias")),),
    actions=(Backward(), Step(optimizer=0)),
)


def changed(trace: list[list[Entry]], rank: int, change: float) -> list[list[Entry]]:
    """Return a trace in which one element of the last values of one rank is changed."""
    number, label, values = trace[rank][-1]
    name, value = list(values.items())[-1]
    assert value is not None
    other = value.copy()
    other.ravel()[-1] += change
    mine = [*trace[rank][:-1], (number, label, {**values, name: other})]
    return [mine if place == rank else each for place, each in enumerate(trace)]


def test_a_wrong_value_is_found() -> None:
    trace = Reference(TRAINED).trace
    assert compare(trace, trace, 1e-9, [0, 1]) == ""
    assert "rank 1, action 1" in compare(trace, changed(trace, 1, 1e-6), 1e-9, [0, 1])


def test_ranks_that_differ_by_rounding_are_found() -> None:
    trace = Reference(TRAINED).trace
    assert "ranks 0 and 1 differ" in compare(trace, changed(trace, 1, 1e-16), 1e-9, [0, 1])


def test_a_gradient_that_should_be_none_is_found() -> None:
    trace = Reference(TRAINED).trace
    number, label, values = trace[0][-1]
    none = [[*trace[0][:-1], (number, label, dict.fromkeys(values))], trace[1]]
    assert "instead of None" in compare(none, trace, 1e-9, [0, 1])
    assert "None instead of" in compare(trace, none, 1e-9, [0, 1])


def test_the_reference_is_training_on_the_joined_batch() -> None:
    """Compare the reference with a model that is trained by hand on the mean of both ranks' losses."""
    from torment.replica import Replica

    reference = Reference(replace(TRAINED, actions=TRAINED.actions * 3))
    first, second = Replica(TRAINED, 0), Replica(TRAINED, 1)
    second.blocks = first.blocks
    optimizer = first.optimizer(TRAINED.optimizers[0])
    for iteration in (0, 2, 4):
        losses = [replica.loss(Backward(), iteration * 100) for replica in (first, second)]
        (sum(losses) / 2).backward()
        optimizer.step()
    wanted = first.values(TRAINED.parameters)
    for trace in reference.trace:
        found = next(values for _, _, values in reversed(trace) if "0.weight" in values)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-12)


def test_the_reference_changes_gradients_as_hooks_do_in_one_process() -> None:
    """Compare the reference with hooks of autograd itself: both kinds on a parameter, and one on its block."""
    from torment.replica import Replica

    hooks = (
        Hook(at="tensor", how="clamp", parameters=("0.weight",)),
        Hook(at="accumulated", how="scale", parameters=("0.weight",)),
        Hook(at="module_pre", how="scale", parameters=("0.bias",), on=(1,)),
    )
    hooked = replace(TRAINED, hooks=hooks)
    trace = Reference(hooked).trace
    grads = []
    for rank in range(2):
        replica = Replica(hooked, rank)
        replica.backward(Backward(), 0)
        grads.append(replica.gradients(TRAINED.parameters))
    for mine in trace:
        found = mine[-1][2]
        for name, value in found.items():
            np.testing.assert_allclose(value, (grads[0][name] + grads[1][name]) / 2, rtol=1e-12)
    assert not np.allclose(trace[0][-1][2]["0.weight.grad"], Reference(TRAINED).trace[0][-1][2]["0.weight.grad"])


def test_a_rank_that_raises_is_reported_and_the_next_program_gets_new_ranks(ranks: Ranks) -> None:
    illegitimate = replace(TRAINED, actions=(Backward(inputs=("0.bias",)), ZeroGrad(optimizer=0), Wait()))
    torment(TRAINED, ranks)
    starts = ranks.starts
    with pytest.raises(BrokenError, match="rank 0 raised"):
        ranks.play(illegitimate)
    assert torment(TRAINED, ranks).played == TRAINED
    assert ranks.starts == starts + 1
