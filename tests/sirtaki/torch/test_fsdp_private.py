"""Private attributes of PyTorch's FSDP2 that Sirtaki uses exist, and a version without one is rejected by name."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.torch_version import TorchVersion

from sirtaki.engine.autograd import in_backward, when_backward_ends
from sirtaki.errors import ConfigError
from sirtaki.torch.fsdp import attach, private
from sirtaki.torch.fsdp.connections import PytorchCollectives

if TorchVersion(torch.__version__) < private.CHECKED_WITH[-1]:
    pytest.skip("FSDP2 of this PyTorch is older than what is supported", allow_module_level=True)

NAMES = [
    (kind, name) for used in (private.USED, private.CUSTOM) for kind, names in used.items() for name in names.split()
]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def groups_of(model: nn.Module) -> list[private.FsdpGroup]:
    return private.find_groups(private.sharded_modules(model))


def hide(patch: pytest.MonkeyPatch, found: Any, name: str) -> None:
    """Remove an attribute from an object, its class, and the class's annotations."""
    classes = found.__mro__ if isinstance(found, type) else type(found).__mro__
    for each in classes:
        if name in vars(each):
            patch.delattr(each, name)
        patch.delitem(vars(each).get("__annotations__", {}), name, raising=False)
    if name in getattr(found, "__dict__", {}):
        patch.delattr(found, name, raising=False)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_an_attribute_is_there_and_the_error_names_it_where_it_is_not(
    model: nn.Module, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups_of(model)
    state = model[0]._get_fsdp_state()
    group = state._fsdp_param_group
    hide(
        monkeypatch,
        {
            "FSDPModule": fsdp.FSDPModule,
            "FSDPState": state,
            "FSDPParamGroup": group,
            "FSDPParam": group.fsdp_params[0],
        }[kind],
        name,
    )
    with pytest.raises(ConfigError, match=rf"needs the attribute {kind}\.{name} of PyTorch's FSDP2"):
        attach(model)


def test_a_version_that_was_not_checked_runs_and_is_logged_once(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private, "CHECKED_WITH", ("0.1",))
    private.log_unchecked_version.cache_clear()
    with caplog.at_level(logging.INFO, "sirtaki"):
        private.log_unchecked_version()
        private.log_unchecked_version()
    assert [record.getMessage() for record in caplog.records] == [
        f"sirtaki.torch.fsdp was not tested with PyTorch {'.'.join(torch.__version__.split('.')[:2])}, only with 0.1; "
        "training continues"
    ]
    private.log_unchecked_version.cache_clear()


def test_a_group_has_its_parameters(model: nn.Module) -> None:
    first, second = groups_of(model)
    assert [group.number for group in (first, second)] == [0, 1]
    assert first.description == [((6, 4), "torch.float32", True), ((6,), "torch.float32", True)]
    assert first.n_bytes == (4 * 30, 4 * 30)
    assert first.layout == second.layout
    assert first.param_ids == {id(param) for param in model[0].parameters()}
    assert not first.has_gradient_hooks
    model[0].weight.register_post_accumulate_grad_hook(lambda param: None)
    assert first.has_gradient_hooks
    assert not second.has_gradient_hooks


def test_a_group_reports_its_prefetching_and_its_carrier(model: nn.Module) -> None:
    first, second = groups_of(model)
    assert not first.has_user_prefetch
    first.set_prefetch([second], [])
    assert first.has_user_prefetch
    assert [private.collective_name(each) for each in first.collectives] == ["DefaultAllGather", "DefaultReduceScatter"]
    assert all(map(private.is_default, first.collectives))
    assert first.shard_process_group.size() == first.shards == 1
    assert first.all_process_groups == [first.shard_process_group] * 2
    assert first.gathered_again
    assert not first.replicated


def test_what_this_pytorch_lacks_or_the_user_has_set_is_not_tried(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model(torch.ones(3, 4)).sum().backward()
    collectives = PytorchCollectives(groups_of(model), None)
    group = model[0]._get_fsdp_state()._fsdp_param_group
    with caplog.at_level(logging.INFO, "sirtaki"):
        assert collectives.choices() == ((1, 2), 2)
        monkeypatch.setattr(group.mesh_info, "reduce_scatter_process_group", dist.group.WORLD)
        assert collectives.choices() == ((1,), 2)
        assert not caplog.records
        monkeypatch.delattr(group.comm_ctx, "reduce_scatter_max_input_buffers")
        assert collectives.choices() == ((1,), 1)
    assert [record.getMessage() for record in caplog.records] == [
        "Sirtaki does not try several reduce-scatters in flight for this sharded model, because PyTorch "
        f"{torch.__version__} has no set_reduce_scatter_max_input_buffers()"
    ]


def test_the_phase_is_known_in_each_pass(model: nn.Module) -> None:
    first, _ = groups_of(model)
    phases = [first.phase]
    hook = model[0].register_forward_hook(lambda *args: phases.append(first.phase), prepend=True)
    output = model(torch.ones(3, 4))
    hook.remove()
    output.register_hook(lambda gradient: phases.append(str(in_backward())))
    output.sum().backward()
    assert phases == ["IDLE", "FORWARD", "True"]
    assert not in_backward()


def test_a_gather_that_was_not_used_is_dropped(model: nn.Module) -> None:
    model(torch.ones(3, 4)).sum().backward()
    first, _ = groups_of(model)
    model[0].unshard(async_op=True)
    assert first.drop_gather()
    assert not first.drop_gather()
    model(torch.ones(3, 4)).sum().backward()


def test_a_scatter_is_read_early_where_gradients_accumulate_or_are_cast(model: nn.Module) -> None:
    first, _ = groups_of(model)
    model(torch.ones(3, 4)).sum().backward()
    assert first.reads_scatter_result(torch.float32), "a gradient is there"
    model.zero_grad()
    assert not first.reads_scatter_result(torch.float32)
    assert first.reads_scatter_result(torch.bfloat16)


def test_a_call_is_made_when_the_backward_pass_ends() -> None:
    seen, leaf = [], torch.ones(2, requires_grad=True)
    doubled = leaf * 2
    doubled.register_hook(lambda gradient: when_backward_ends(lambda: seen.append(leaf.grad is not None)))
    doubled.sum().backward()
    assert seen == [True]
