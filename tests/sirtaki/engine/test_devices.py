"""Where gradients are decides what carries them; no GPU is needed to see which."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.comm import device
from sirtaki.comm.nccl_streams import process_group
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.tuning import warmup as devices
from sirtaki.engine.tuning.warmup import open_router

Opened = dict[str, Any]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """What the last router was opened with, beside the ranks."""
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


def on(*places: str) -> list[Any]:
    return [SimpleNamespace(device=torch.device(place)) for place in places]


def settings(transport: TransportKind | None = None) -> Any:
    return SimpleNamespace(transport=transport, transport_timeout_s=9.0)


def test_gradients_on_the_host_need_no_device(opened: Opened) -> None:
    for params in (on("cpu", "cpu"), []):
        assert open_router(None, settings(), params) == "the router"  # type: ignore[arg-type]
        assert opened == {"timeout_s": 9.0}


@pytest.mark.parametrize(("places", "index"), [(["cpu", "cuda:1", "cuda:0"], 1), (["cuda"], 3)])
def test_those_on_gpus_go_by_nccl_on_the_first_one(
    places: list[str], index: int, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    open_router(None, settings(), on(*places))  # type: ignore[arg-type]
    device = f"cuda {index}"
    assert opened == {"timeout_s": 9.0, "device": device, "nccl": f"nccl on {device}, if it is there, 9.0"}
    assert caplog.messages == []


def test_nccl_can_be_asked_for_or_left_out(opened: Opened) -> None:
    open_router(None, settings(TransportKind.NCCL), on("cuda:0"))  # type: ignore[arg-type]
    assert opened["nccl"] == "nccl on cuda 0, forced, 9.0"
    open_router(None, settings(TransportKind.STAGED), on("cuda:0"))  # type: ignore[arg-type]
    assert opened == {"timeout_s": 9.0, "device": "cuda 0"}


def test_other_devices_are_told_to_go_through_the_host(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_router(None, settings(), on("xpu:0", "cpu", "mps"))  # type: ignore[arg-type]
    assert caplog.messages == ["gradients on mps, xpu travel through host memory"]
    assert opened == {"timeout_s": 9.0}
