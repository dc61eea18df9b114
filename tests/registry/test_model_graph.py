import gc
import os
import subprocess
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as torch_module
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from sirtaki.registry import model_graph as recorder_module
from sirtaki.registry.graph import ModelGraph, fingerprint
from sirtaki.registry.model_graph import CapturedGraph, ModelGraphRecorder, capture, shapes_graph


def capture_of(model: nn.Module, output: object) -> CapturedGraph:
    return capture(output, {id(parameter): tuple(parameter.shape) for parameter in model.parameters()})


def texts(graph: ModelGraph | None) -> list[str]:
    assert graph is not None
    return [str(node) for node in graph.labels]


class Bottleneck(nn.Module):
    def __init__(self, n_in: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(n_in, width, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1), nn.BatchNorm2d(4 * width)),
        )
        self.short = nn.Identity() if n_in == 4 * width else nn.Conv2d(n_in, 4 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet(n_blocks: tuple[int, ...], width: int = 4) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3)]
    n_channels = width
    for stage, count in enumerate(n_blocks):
        for _ in range(count):
            layers.append(Bottleneck(n_channels, width << stage))
            n_channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_channels, 10))


def test_a_chain_of_layers_is_a_chain_of_nodes_with_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 2, bias=False))
    found = capture_of(model, model(torch.randn(3, 4)))
    assert texts(found.graph) == ["Addmm 8,8x4+Relu+Mul", "Mm 2x8"]
    assert list(found.graph.edges) == [(0, 1)]
    assert [node.size for node in found.graph.labels] == [40, 16]
    assert found.n_reached == 3


def test_branches_stay_branches() -> None:
    model = Bottleneck(16, 4)
    graph = capture_of(model, model(torch.randn(2, 16, 5, 5, requires_grad=True))).graph
    kinds = Counter(node.kind for node in graph.labels)
    assert kinds["Convolution"] == 3
    assert kinds["NativeBatchNorm"] == 3
    assert kinds["Add"] == 1
    add = next(index for index, node in enumerate(graph.labels) if node.kind == "Add")
    assert len([edge for edge in graph.edges if edge[1] == add]) == 2


def test_a_shared_weight_is_a_node_of_its_own_with_two_users() -> None:
    layer = nn.Linear(4, 4, bias=False)
    graph = capture_of(layer, layer(torch.tanh(layer(torch.randn(2, 4))))).graph
    (weight,) = [index for index, node in enumerate(graph.labels) if node.kind == "parameter"]
    assert len([edge for edge in graph.edges if edge[0] == weight]) == 2


def test_several_outputs_in_any_nesting_are_one_graph() -> None:
    trunk, heads = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2), nn.Linear(4, 3)])
    model = nn.ModuleList([trunk, heads])
    y = trunk(torch.randn(2, 4))

    class Output:
        def __init__(self) -> None:
            self.logits = heads[2](y)
            self.me = self

    found = capture_of(model, {"a": heads[0](y), "rest": [(heads[1](y), None, "text", 3)], "object": Output()})
    assert found.n_reached == 8
    assert sorted(texts(found.graph)) == ["Addmm 1,1x4", "Addmm 2,2x4", "Addmm 3,3x4", "Addmm 4,4x4"]
    assert len(found.graph.edges) == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_parameters_of_checkpointed_blocks_are_not_lost(use_reentrant: bool) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 8)
    output = checkpoint(second, first(torch.randn(2, 4)), use_reentrant=use_reentrant)
    found = capture_of(nn.ModuleList([first, second]), output)
    assert sum(node.size for node in found.graph.labels) == 20 + 40
    assert found.n_reached == (2 if use_reentrant else 4)


def test_unused_parameters_are_a_chain_beside_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    found = capture_of(model, model[0](torch.randn(2, 4)))
    assert texts(found.graph) == ["Addmm 4,4x4", "parameter 3x3", "parameter 3"]
    assert list(found.graph.edges) == [(1, 2)]


def test_an_operation_that_hides_a_whole_model_becomes_the_chain_of_its_parameters() -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, *parameters: torch.Tensor) -> torch.Tensor:
            return sum((parameter.sum() for parameter in parameters), torch.zeros(()))

    model = nn.ParameterList([torch.randn(n + 1) for n in range(20)])
    graph = capture_of(model, Fused.apply(*model)).graph
    assert texts(graph) == [f"parameter {n + 1}" for n in range(20)]
    assert list(graph.edges) == [(n, n + 1) for n in range(19)]


def test_an_output_without_gradients_has_no_graph() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        found = capture_of(model, model(torch.randn(1, 2)))
    assert found.n_reached == 0


def test_batch_size_and_values_do_not_matter_but_shapes_do() -> None:
    def of(width: int, batch: int) -> str:
        model = resnet((1, 1), width)
        return fingerprint(capture_of(model, model(torch.randn(batch, 3, 9, 9))).graph)

    assert of(4, 1) == of(4, 5)
    assert of(4, 1) != of(5, 1)


@pytest.mark.lengthy
def test_the_fingerprint_is_the_same_in_every_process() -> None:
    script = (
        "import torch\n"
        "from test_model_graph import capture_of, fingerprint, resnet\n"
        "model = resnet((1, 2))\n"
        "print(fingerprint(capture_of(model, model(torch.randn(2, 3, 9, 9))).graph))\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    model = resnet((1, 2))  # in this process hash seeds are drawn
    assert done.stdout == fingerprint(capture_of(model, model(torch.randn(2, 3, 9, 9))).graph) + "\n"


@pytest.mark.lengthy
def test_a_graph_deeper_than_the_stack_is_walked() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y * 1.5
    graph = capture(y, {id(x): (1,)}).graph
    assert len(graph) == 1


def test_a_resnet_152_is_captured_in_50_ms_and_keeps_no_activation() -> None:
    model = resnet((3, 8, 36, 3))
    output = model(torch.randn(1, 3, 9, 9))
    capture_of(model, output)
    took_s = []
    for _ in range(7):
        start_s = time.thread_time()
        graph = capture_of(model, output).graph
        took_s.append(time.thread_time() - start_s)
    assert min(took_s) < 0.05
    assert 300 < len(graph) < 500
    kept = weakref.ref(output)
    gc.disable()  # nothing may hang in a cycle that only the collector would break
    del output
    assert kept() is None
    gc.enable()


def test_a_chain_replaces_the_graph_if_only_the_layout_is_known() -> None:
    assert texts(shapes_graph([(3, 10), (), (7,)])) == ["parameter 3x10", "parameter scalar", "parameter 7"]
    assert [node.size for node in shapes_graph([(3, 10), ()]).labels] == [30, 1]
    assert list(shapes_graph([(1,), (2,), (3,)]).edges) == [(0, 1), (1, 2)]
    assert len(shapes_graph([])) == 0


def test_a_model_of_which_a_part_is_reduced_is_another_graph_for_each_part() -> None:
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(4, 4), nn.ReLU())])
    output = model(torch.randn(2, 4))
    halves = [[parameter for layer in layers for parameter in layer.parameters()] for layers in (model[:4], model[4:])]
    first, second = (
        capture(output, {id(parameter): tuple(parameter.shape) for parameter in half}).graph for half in halves
    )
    assert texts(first) == ["Addmm 4,4x4+Relu"] * 2 + ["Addmm other 4,other 4x4+Relu"] * 2
    assert sum(node.size for node in first.labels) == 40
    assert len({*map(fingerprint, (first, second, capture_of(model, output).graph))}) == 3


@pytest.fixture(autouse=True)
def _no_hook_is_left_behind() -> Iterator[None]:
    yield
    assert not watches()


@pytest.fixture
def recorder() -> Iterator[ModelGraphRecorder]:
    recorder = ModelGraphRecorder()
    yield recorder
    counters.clear()  # else a hook stays for what was compiled
    recorder.stop()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


MLP_TEXTS = ["Addmm 8,8x4+Relu", "Addmm 8,8x8+Relu", "Addmm 2,2x8"]


def watches() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def test_the_first_forward_pass_records_the_graph_and_the_hooks_are_removed(recorder: ModelGraphRecorder) -> None:
    model = mlp()
    assert recorder.graph is None
    recorder.start(model.parameters())
    assert watches()
    model(torch.randn(2, 4))
    assert not watches()
    assert texts(recorder.graph) == MLP_TEXTS
    assert recorder.model_name == "Sequential"
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_under_ddp_has_its_own_name(recorder: ModelGraphRecorder) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(mlp())
        recorder.start(model.parameters())
        model(torch.randn(2, 4))
        assert recorder.model_name == "Sequential"
    finally:
        dist.destroy_process_group()


def test_a_pass_without_gradients_and_another_model_are_not_taken_for_it(recorder: ModelGraphRecorder) -> None:
    model = mlp()
    recorder.start(model.parameters())
    with torch.no_grad():
        model(torch.randn(2, 4))
    nn.Linear(3, 3)(torch.randn(1, 3))
    assert recorder.model_name == ""
    model(torch.randn(2, 4))
    assert texts(recorder.graph) == MLP_TEXTS


def test_a_model_called_in_pieces_is_put_together(recorder: ModelGraphRecorder) -> None:
    encoder, decoder = nn.Linear(4, 3), nn.Linear(3, 2)
    recorder.start([*encoder.parameters(), *decoder.parameters()])
    decoder(encoder(torch.randn(1, 4)))
    assert texts(recorder.graph) == ["Addmm 3,3x4", "Addmm 2,2x3"]
    assert not watches()


def test_with_unused_parameters_it_stops_after_a_few_calls(recorder: ModelGraphRecorder) -> None:
    model, unused, loss = nn.Linear(4, 3), nn.Linear(5, 5), nn.CrossEntropyLoss()
    recorder.start([*model.parameters(), *unused.parameters()])
    for _ in range(8):
        loss(model(torch.randn(1, 4)), torch.tensor([1]))
    assert not watches()
    assert recorder.model_name == "Linear"  # the loss shows no more of the parameters
    assert texts(recorder.graph) == ["Addmm 3,3x4", "parameter 5x5", "parameter 5"]


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
    assert texts(recorder.graph) == ["Addmm 4,4x4"]
    assert recorder.model_name == "Moody"


@pytest.mark.parametrize("place", ["capture", "topological_order"])
def test_a_fault_of_ours_never_reaches_the_user(
    place: str, recorder: ModelGraphRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(recorder_module, place, fail)
    model = mlp()
    recorder.start(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    assert not watches()
    assert texts(recorder.graph) == texts(shapes_graph([p.shape for p in reversed(list(model.parameters()))]))
    assert recorder.model_name == ""


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
    assert not watches()


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
    assert recorder.model_name == ""
    recorder.start(model.parameters())
    recorder.start(model.parameters())
    model(torch.randn(2, 4))
    assert recorder.model_name == "Sequential"


NEW = TorchVersion(torch.__version__) >= "2.7"
"""True if hooks on all modules break no graph in this version of PyTorch."""


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.relu(self.first(x)))
        return y


@pytest.mark.lengthy
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
    if how == "in place" and NEW:  # the hook is compiled, too, and does nothing: the parameters stand in for the graph
        assert recorder.graph is not None
        assert recorder.model_name == ""
        return
    assert texts(recorder.graph) == ["Addmm 4,4x4+Relu", "Addmm 2,2x4"]
    assert recorder.model_name == ("Sequential" if how == "inside" else "Compiled")


@pytest.mark.lengthy
@pytest.mark.skipif(not NEW, reason="this PyTorch cannot guard hooks on all modules")
def test_a_function_that_calls_the_model_is_compiled_once_in_one_graph(recorder: ModelGraphRecorder) -> None:
    from torch import _dynamo

    _dynamo.reset()
    _dynamo.utils.counters.clear()
    model = Compiled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!.*global hooks)")
        loss = torch.compile(lambda inputs: model(inputs).sum(), backend="eager", fullgraph=True)
        recorder.start(model.parameters())
        for _ in range(3):
            loss(torch.randn(2, 4)).backward()
            nn.Identity()(torch.ones(1))  # a module that is not compiled
        recorder.stop()
        loss(torch.randn(2, 4)).backward()
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == 1
