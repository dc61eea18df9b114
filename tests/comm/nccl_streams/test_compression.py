"""Compression on a GPU: loaded state outlives the units that read it, and a failed job is not waited for."""

import pytest
import torch
from conformance.compressed_units import Units
from fakes.cuda import FakeCuda

from sirtaki.comm.compress import CompressionInput, Lane, MatrixSlice, PowerSgd
from sirtaki.comm.control.members import alone
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import cuda_device
from sirtaki.comm.nccl_streams.transport import find_nccl
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.router import Router
from sirtaki.errors import CommError

ROUTE = (TransportKind.NCCL, Algorithm.FLAT)
ROWS, COLUMNS = 64, 50


@pytest.fixture(autouse=True)
def launch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def router_of(cuda: FakeCuda, control: ControlPlane) -> Router:
    device = cuda_device(cuda.index)
    nccl = find_nccl(control, device, forced=False, timeout_s=30.0)
    assert nccl is not None
    return Router(control, timeout_s=30.0, device=device, nccl=nccl)


def test_a_loaded_factor_is_not_overwritten_while_its_unit_reads_it() -> None:
    with FakeCuda() as cuda:
        router = router_of(cuda, ControlPlane(alone()))
        router.open_streams(ROUTE, 1)
        lane: Lane = {"route": ROUTE, "stream": 0, "threads": None, "nccl": None}
        values = torch.ones(ROWS * COLUMNS, device="cuda")
        loaded = {"w[0:]": torch.ones(COLUMNS, 1, device="cuda")}
        result = torch.empty_like(values)
        unit = CompressionInput(
            values, [MatrixSlice("w[0:]", 0, ROWS * COLUMNS, COLUMNS)], loaded, {}, 0, 1, router, lane
        )
        stream = cuda.make_stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.on(stream):
            PowerSgd(1).reduce(unit, result, 1.0)  # replaces the loaded factor by one of its own stream
        torch.ones(COLUMNS, device="cuda")  # may get the memory of the loaded factor
        cuda.check()
        torch.testing.assert_close(result.cpu(), values.new_ones(ROWS * COLUMNS).cpu(), rtol=1e-5, atol=1e-5)


def test_residuals_are_not_used_after_the_job_has_failed() -> None:
    """The failure may have aborted the operations for which the host waits."""
    with FakeCuda() as cuda:
        control = ControlPlane(alone())
        units = Units(control, router_of(cuda, control), ROUTE, "int8")
        control.failures.report(CommError("rank 7 has exited"))
        with pytest.raises(CommError, match="rank 7 has exited"):
            units.compressed.lay_out([], [])
