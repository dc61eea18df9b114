import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from sirtaki.registry import model_graph as recorder_module
from sirtaki.registry.model_graph import ModelGraphRecorder, shapes_graph


@pytest.fixture(autouse=True)
def _no_hook_is_left_behind() -> Iterator[None]:
    yield
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


@pytest.fixture
def recorder() -> Iterator[ModelGraphRecorder]:
    recorder = ModelGraphRecorder()
    yield recorder
    recorder.stop()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


MLP_TEXTS = ["Addmm 8,8x4+Relu", "Addmm 8,8x8+Relu", "Addmm 2,2x8"]


def texts(recorder: ModelGraphRecorder) -> list[str]:
    assert recorder.graph is not None
    return [str(node) for node in recorder.graph.nodes]


def test_the_first_forward_pass_shows_the_graph_and_the_hooks_go(recorder: ModelGraphRecorder) -> None:
    model = mlp()
    assert recorder.graph is None
    recorder.start(model.parameters())
    assert recorder.is_watching
    assert not recorder.found
    model(torch.randn(2, 4))
    assert recorder.found
    assert not recorder.is_watching
    assert texts(recorder) == MLP_TEXTS
    assert recorder.model_name == "Sequential"
    assert not any(module._forward_hooks for module in model.modules())


def test_a_pass_without_gradients_is_not_the_first(recorder: ModelGraphRecorder) -> None:
    model = mlp()
    recorder.start(model.parameters())
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert not recorder.found
    model(torch.randn(2, 4))
    assert texts(recorder) == MLP_TEXTS


def test_another_model_is_not_taken_for_it(recorder: ModelGraphRecorder) -> None:
    model, other = mlp(), nn.Linear(3, 3)
    recorder.start(model.parameters())
    other(torch.randn(1, 3))
    assert not recorder.found
    model(torch.randn(2, 4))
    assert texts(recorder) == MLP_TEXTS


def test_a_model_called_in_pieces_is_put_together(recorder: ModelGraphRecorder) -> None:
    encoder, decoder = nn.Linear(4, 3), nn.Linear(3, 2)
    recorder.start([*encoder.parameters(), *decoder.parameters()])
    decoder(encoder(torch.randn(1, 4)))
    assert texts(recorder) == ["Addmm 3,3x4", "Addmm 2,2x3"]
    assert not recorder.is_watching


def test_with_unused_parameters_it_stops_after_a_few_calls(recorder: ModelGraphRecorder) -> None:
    model, unused, loss = nn.Linear(4, 3), nn.Linear(5, 5), nn.CrossEntropyLoss()
    recorder.start([*model.parameters(), *unused.parameters()])
    for _ in range(8):
        loss(model(torch.randn(1, 4)), torch.tensor([1]))
    assert not recorder.is_watching
    assert recorder.model_name == "Linear"  # the loss shows no more of the parameters
    assert texts(recorder) == ["Addmm 3,3x4", "parameter 5x5", "parameter 5"]


def test_an_exception_in_the_users_model_passes_and_the_next_call_counts(recorder: ModelGraphRecorder) -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.angry = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            if self.angry:
                raise ValueError("not today")
            return y

    model = Moody()
    recorder.start(model.parameters())
    with pytest.raises(ValueError, match="not today"):
        model(torch.randn(1, 4))
    model.angry = False
    model(torch.randn(1, 4))
    assert texts(recorder) == ["Addmm 4,4x4"]
    assert recorder.model_name == "Moody"


def test_a_fault_of_ours_never_reaches_the_user(recorder: ModelGraphRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(recorder_module, "capture", fail)
    model = mlp()
    recorder.start(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    assert not recorder.is_watching
    assert not recorder.found
    assert recorder.graph == shapes_graph([p.shape for p in reversed(list(model.parameters()))])


def test_an_output_with_hostile_attributes_is_survived(recorder: ModelGraphRecorder) -> None:
    class Hostile:
        @property
        def grad_fn(self) -> object:
            raise RuntimeError("go away")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self) -> Hostile:
            return Hostile()

    model = Model()
    recorder.start(model.parameters())
    assert isinstance(model(), Hostile)
    assert not recorder.is_watching


def test_nothing_of_the_forward_pass_is_kept(recorder: ModelGraphRecorder) -> None:
    model = mlp()
    recorder.start(model.parameters())
    output = model(torch.randn(2, 4))
    references = [weakref.ref(output), *(weakref.ref(parameter) for parameter in model.parameters())]
    del output, model
    assert [reference() for reference in references] == [None] * len(references)


def test_it_can_be_stopped_and_started_again(recorder: ModelGraphRecorder) -> None:
    model = mlp()
    recorder.start(model.parameters())
    recorder.stop()
    recorder.stop()
    model(torch.randn(2, 4))
    assert not recorder.found
    recorder.start(model.parameters())
    recorder.start(model.parameters())
    model(torch.randn(2, 4))
    assert recorder.found


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.relu(self.first(x)))
        return y


@pytest.mark.parametrize("how", ["outside", "inside", "in place"])
def test_a_compiled_model_is_compiled_once_all_the_same(recorder: ModelGraphRecorder, how: str) -> None:
    from torch import _dynamo

    _dynamo.reset()
    inner = Compiled()
    model: nn.Module = inner
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!.*global hooks)")  # torch's own, under "error", when it compiles
        if how == "outside":
            model = torch.compile(inner, backend="eager")  # type: ignore[assignment]
        elif how == "inside":
            model = nn.Sequential(torch.compile(inner, backend="eager"))  # type: ignore[arg-type]
        else:
            inner.compile(backend="eager")
        _dynamo.utils.counters.clear()
        recorder.start(inner.parameters())
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert texts(recorder) == ["Addmm 4,4x4+Relu", "Addmm 2,2x4"]
    assert recorder.model_name == ("Sequential" if how == "inside" else "Compiled")
