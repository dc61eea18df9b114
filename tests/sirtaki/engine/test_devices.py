"""The device of gradients determines the transport. Tested without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.comm import device
from sirtaki.comm.nccl_streams import transport as process_group
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.tuning import pipeline_target as devices
from sirtaki.engine.tuning.pipeline_target import open_router
from sirtaki.errors import ConfigError

Opened = dict[str, Any]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Return the arguments of the last router, except the ranks."""
    found: Opened = {}

    def router(control: Any, **options: Any) -> str:
        found.clear()
        found.update(options)
        return "the router"

    def find_nccl(control: Any, device: Any, *, forced: bool, timeout_s: float) -> str:
        return f"nccl on {device}, {'forced' if forced else 'if it is there'}, {timeout_s}"

    monkeypatch.setattr(devices, "Router", router)
    monkeypatch.setattr(device, "cuda_device", lambda index: f"cuda {index}")
    monkeypatch.setattr(process_group, "find_nccl", find_nccl)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return found


HOST: Opened = {"timeout_s": 9.0}


def by_nccl(index: int, how: str) -> Opened:
    return {**HOST, "device": f"cuda {index}", "nccl": f"nccl on cuda {index}, {how}, 9.0"}


@pytest.mark.parametrize(
    ("places", "transport", "wanted"),
    [
        (["cpu", "cpu"], None, HOST),
        ([], None, HOST),
        (["cuda"], None, by_nccl(3, "if it is there")),
        (["cuda:1", "cuda:1"], None, by_nccl(1, "if it is there")),
        (["cuda"], TransportKind.NCCL, by_nccl(3, "forced")),
        (["cuda"], TransportKind.STAGED, {**HOST, "device": "cuda 3"}),
    ],
)
def test_nccl_reduces_gradients_on_gpus_by_default(
    places: list[str], transport: TransportKind | None, wanted: Opened, opened: Opened
) -> None:
    params: list[Any] = [SimpleNamespace(device=torch.device(place)) for place in places]
    settings: Any = SimpleNamespace(transport=transport, transport_timeout_s=9.0)
    assert open_router(None, settings, params) == "the router"  # type: ignore[arg-type]
    assert opened == wanted


@pytest.mark.parametrize(
    ("places", "named"),
    [(["cpu", "cuda:1", "cuda:0"], "cpu and cuda:0 and cuda:1"), (["xpu:0"], "xpu:0"), (["cpu", "mps"], "cpu and mps")],
)
def test_parameters_on_several_devices_or_on_other_ones_are_refused(places: list[str], named: str) -> None:
    params: list[Any] = [SimpleNamespace(device=torch.device(place)) for place in places]
    with pytest.raises(ConfigError, match=f"the parameters are on {named}; they must all be on the CPU or all on one"):
        open_router(None, None, params)  # type: ignore[arg-type]
