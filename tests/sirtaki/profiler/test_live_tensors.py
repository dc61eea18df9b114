"""What tensors hold is found, once, and what for."""

import tempfile

import pytest
import torch
from torch import nn

from sirtaki.analysis.recording import Holds
from sirtaki.analysis.step_tensors import LiveStorage, address_of, live_storages


def of(tensor: torch.Tensor, found: list[LiveStorage]) -> LiveStorage:
    (one,) = (each for each in found if (each.device, each.address) == address_of(tensor))
    return one


def test_each_storage_is_told_once_and_what_for() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    flat = torch.zeros(100)
    model[1].weight.grad = flat[:8]
    mine, view = torch.ones(1000), None
    view = mine[10:20]
    found = live_storages()
    weight = model[0].weight
    assert of(weight, found).holds is Holds.PARAMETERS
    assert of(weight, found).n_bytes == 8 * 8 * 4
    assert of(weight.grad, found).holds is Holds.GRADIENTS
    assert of(flat, found).holds is Holds.FLAT_BUFFERS
    assert of(model[1].running_mean, found).holds is Holds.MODULE_BUFFERS
    assert of(optimizer.state[weight]["exp_avg"], found).holds is Holds.OPTIMIZER
    assert of(view, found).holds is Holds.OTHER
    assert of(view, found).n_bytes == 4000


def test_tensors_without_memory_of_their_own_have_no_address() -> None:
    assert address_of(torch.empty(0)) is None
    assert address_of(torch.eye(3).to_sparse()) is None
    kept = torch.ones(5, device="meta")
    assert all(one.device != "meta" for one in live_storages())
    del kept


def test_files_that_are_mapped_are_not_held() -> None:
    with tempfile.NamedTemporaryFile() as file:
        mapped = torch.from_file(file.name, shared=True, size=100)
        assert not any((one.device, one.address) == address_of(mapped) for one in live_storages())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_all_that_a_device_has_given_out_is_known() -> None:
    kept = torch.ones(1000, device="cuda")
    found = [one for one in live_storages() if one.device == str(kept.device)]
    assert sum(one.n_bytes for one in found) == torch.cuda.memory_allocated(kept.device)
