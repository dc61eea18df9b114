"""Sparse gradients on fake GPUs: rows are summed over NCCL as on the host, and the host never waits."""

import pytest
import torch
from fakes.cuda import FakeCuda
from rank_jobs import OVER_MESH, UNTUNED, Job, played_on_ranks, slow

from sirtaki.comm.control.members import alone
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import cuda_device
from sirtaki.comm.nccl_streams.transport import find_nccl
from sirtaki.comm.sparse.on_gpu import GpuRows, GpuWork
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.comm.sparse.worker import RowFormat, SparseLanes, SparseWorker
from sirtaki.errors import CommError

ENV = {**OVER_MESH, **UNTUNED}

test_rows_are_summed_on_the_gpu = played_on_ranks(
    "sparse_on_gpu",
    Job(2, env=ENV),
    Job(3, label="gather", env={**ENV, "SIRTAKI_SPARSE": "gather"}),
    slow(Job(4, label="gather", env={**ENV, "SIRTAKI_SPARSE": "gather"})),
    slow(Job(2, label="dense", env={**ENV, "SIRTAKI_SPARSE": "dense"})),
)
test_rows_are_summed_on_the_gpu_in_a_tuned_job = played_on_ranks(
    "sparse_on_gpu", Job(2, label="tuned", env={**OVER_MESH, "SIRTAKI_REGISTRY": "off"})
)
test_rows_are_summed_on_the_host_where_nccl_cannot = played_on_ranks(
    "sparse_on_gpu",
    Job(2, label="owner", env={**ENV, "SIRTAKI_SPARSE": "owner"}),
    slow(Job(2, label="staged", env={**ENV, "SIRTAKI_TRANSPORT": "staged"})),
)


def test_a_sum_that_cannot_be_launched_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the GPUs of the other ranks would wait for it."""
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with FakeCuda() as cuda:
        control, device = ControlPlane(alone()), cuda_device(cuda.index)
        nccl = find_nccl(control, device, forced=False, timeout_s=30.0)
        assert nccl is not None
        worker = SparseWorker(SparseLanes(control, timeout_s=30.0, kind=None, streams=1), control.failures)
        rows = GpuRows(control, device, nccl, worker, timeout_s=30.0)
        rows.begin(["w"], factor=1.0)
        gradient = torch.sparse_coo_tensor(
            torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 2), (1, 2), check_invariants=True
        )
        too_large = RowFormat(1 << 50, 2, torch.float32)
        rows.submit(GpuWork("w", gradient, too_large, SparsePath.DENSE, measures=False), 1)
        for _ in range(2):
            with pytest.raises(CommError, match="failed to launch the sums of sparse gradients on the GPU"):
                rows.launch(None)
        assert control.failures.error is not None
        worker.close()
        rows.close()
