"""Models compiled in parts: equal results for all kinds of models, and gradients that are ready one by one."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd
from sirtaki.engine import job
from sirtaki.errors import ConfigError
from sirtaki.torch.compile_backend import LEAST_PART_BYTES, PARTS, EarlyGradients, usual_part_bytes

WIDTH = 16
PART_BYTES = 4 * WIDTH * WIDTH  # one Linear's weight
CHECKPOINTED = 4 if "higher" not in inspect.getsource(DDPOptimizer) else 1
"""Parts of four checkpointed blocks: older versions of torch do not cut what calls another graph."""


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, when it compiles
        yield
    torch.compiler.reset()


class Counting:
    """An inner backend that computes as AOTAutograd does, and counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.checkpointed = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def plain() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


class Tied(nn.Module):
    """The first weight is the last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(32, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding((x[..., 0] * 7).long() % 32)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden @ self.embedding.weight.t()


class Buffered(nn.Module):
    """Running statistics, written in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.other(self.shared(x)))


class Broken(nn.Module):
    """A module of which Dynamo makes two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = plain(), plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(hidden)


class Checkpointed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Block(checkpointed=True) for _ in range(4)))


def numbers(model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], *, rows: int = 8) -> list[torch.Tensor]:
    """Losses, gradients and buffers of three steps."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = forward(torch.rand(rows, WIDTH, generator=generator)).square().mean()
        loss.backward()
        found.append(loss.detach())
        found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return [*found, *(one.clone() for one in model.buffers())]


def compiled_both_ways(make: Callable[[], nn.Module], **options: Any) -> tuple[list[Any], list[Any], int]:
    """Return results of the model as a whole and in parts, and the number of graphs of the parts."""
    torch.manual_seed(3)
    whole = make()
    early = copy.deepcopy(whole)
    inner = Counting()
    expected = numbers(whole, torch.compile(whole, backend="aot_eager", **options))
    torch.compiler.reset()
    found = numbers(early, torch.compile(early, backend=hvd.early_gradients(inner, part_bytes=PART_BYTES), **options))
    return expected, found, inner.graphs


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("make", "least"),
    [
        *((plain, 4), (Tied, 3), (Twice, 2)),
        pytest.param(Checkpointed, CHECKPOINTED, marks=pytest.mark.integration),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((Buffered, 3), (Broken, 8))),
    ],
)
def test_a_model_in_parts_computes_the_same_bit_by_bit(make: Callable[[], nn.Module], least: int) -> None:
    expected, found, graphs = compiled_both_ways(make)
    assert len(expected) > 3
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert graphs >= least


def test_a_model_smaller_than_a_part_stays_whole() -> None:
    inner, model = Counting(), plain()
    n_bytes = 4 * sum(one.numel() for one in model.parameters())
    torch.compile(model, backend=EarlyGradients(inner, n_bytes))(torch.rand(8, WIDTH)).sum().backward()
    assert inner.graphs == 1


@pytest.mark.lengthy
def test_gradients_are_ready_one_part_after_the_other() -> None:
    came: dict[str, list[int]] = {}
    for name, part_bytes in (("whole", 10**9), ("early", PART_BYTES)):
        torch.compiler.reset()
        model, backwards = plain(), [0]
        came[name] = []
        forward = torch.compile(model, backend=EarlyGradients("aot_eager", part_bytes))
        forward(torch.rand(8, WIDTH)).sum().backward()
        with torch.profiler.profile() as profiler:
            forward(torch.rand(8, WIDTH)).sum().backward()
        names = [event.name for event in profiler.events() if "evaluate_function" in event.name]
        for one in names:
            backwards[0] += one.endswith("CompiledFunctionBackward")
            if one.endswith("AccumulateGrad"):
                came[name].append(backwards[0])
    assert set(came["whole"]) == {1}
    assert len(set(came["early"])) >= 4
    assert came["early"] == sorted(came["early"])


@pytest.mark.lengthy
def test_batches_of_other_sizes_are_compiled_once_with_a_dynamic_size() -> None:
    torch.manual_seed(3)
    model = plain()
    inner = Counting()
    forward = torch.compile(model, backend=hvd.early_gradients(inner, part_bytes=PART_BYTES), dynamic=True)
    compiled = set()
    for rows in (8, 5, 12):
        expected = numbers(model, model, rows=rows)
        for one, other in zip(expected, numbers(model, forward, rows=rows), strict=True):
            torch.testing.assert_close(one, other)
        compiled.add(inner.graphs)
    assert len(compiled) == 1
    assert min(compiled) >= 4


@pytest.mark.lengthy
def test_graphs_without_gradients_stay_whole() -> None:
    inner = Counting()
    model = plain().eval()
    forward = torch.compile(model, backend=hvd.early_gradients(inner, part_bytes=PART_BYTES))
    with torch.no_grad():
        given = torch.rand(8, WIDTH)
        torch.testing.assert_close(forward(given), model(given))
    assert inner.graphs == 1
    forward(given).sum().backward()
    assert inner.graphs >= 1 + 4
    before, frozen = inner.graphs, plain().requires_grad_(False)
    torch.compile(frozen, backend=EarlyGradients(inner, PART_BYTES))(given.requires_grad_())
    assert inner.graphs == before + 1


@pytest.mark.slow  # Inductor compiles C++
@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
def test_inductor_is_as_close_to_eager_in_parts_as_it_is_as_a_whole(mode: str | None) -> None:
    torch.manual_seed(3)
    model = plain()
    expected = numbers(model, model)
    forward = torch.compile(model, backend=hvd.early_gradients(part_bytes=PART_BYTES), mode=mode)
    for one, other in zip(expected, numbers(model, forward), strict=True):
        torch.testing.assert_close(one, other)


def test_mode_and_options_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def fake(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        told.append(options)
        return graph.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda backend: fake)
    graph = torch.fx.symbolic_trace(nn.Identity())
    EarlyGradients("inductor", 1)(graph, [], mode="max-autotune-no-cudagraphs", options={"max-fusion-size": 7})
    EarlyGradients("other", 1)(graph, [], mode="fast")
    EarlyGradients("inductor", 1)(graph, [])
    assert told[0]["config_patches"]["max_fusion_size"] == 7
    assert told[0]["config_patches"]["max_autotune"] is True
    assert told[1:] == [{"mode": "fast"}, {}]


def test_a_graph_that_torch_cannot_cut_is_compiled_whole_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("a higher order op")

    monkeypatch.setattr("torch._dynamo.backends.distributed.DDPOptimizer.compile_fn", refuses)
    inner = Counting()
    with caplog.at_level(logging.WARNING, logger="sirtaki"):
        torch.compile(plain(), backend=EarlyGradients(inner, PART_BYTES))(torch.rand(8, WIDTH)).sum().backward()
    assert inner.graphs == 1
    assert "compiled as a whole: a higher order op" in caplog.text


@pytest.mark.parametrize(
    ("size", "one_node", "planned", "expected"),
    [
        (1, True, None, 0),
        (1, True, 5_000_000, 0),
        (4, True, None, 0),
        (4, True, 5_000_000, 5_000_000),
        (4, False, 0, 0),
        (4, False, None, 100_000_000 // PARTS),
    ],
)
def test_without_a_size_the_plan_and_the_place_decide(
    monkeypatch: pytest.MonkeyPatch, size: int, one_node: bool, planned: int | None, expected: int
) -> None:
    assert usual_part_bytes(100_000_000) == 0  # hvd.init() was not called
    fake = SimpleNamespace(size=size, part_bytes=planned, control=SimpleNamespace(one_node=one_node))
    monkeypatch.setattr(job, "_job", fake)
    assert usual_part_bytes(100_000_000) == expected
    if expected and planned is None:
        assert usual_part_bytes(1000) == LEAST_PART_BYTES


def test_an_impossible_backend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="expected a positive number, found 0"):
        hvd.early_gradients(part_bytes=0)
    monkeypatch.setitem(sys.modules, "torch._dynamo.backends.distributed", None)
    with pytest.raises(ConfigError, match=r"torch\.compile is not available in this environment"):
        hvd.early_gradients()


def test_equal_backends_compile_alike() -> None:
    assert hvd.early_gradients("aot_eager", part_bytes=3) == EarlyGradients("aot_eager", 3)
    assert EarlyGradients("aot_eager", 3) != EarlyGradients("aot_eager", 4)
