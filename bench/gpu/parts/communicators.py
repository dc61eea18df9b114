"""NCCL communicators of one rank: limits on CTAs, operations, dtypes, errors, closing, opening again; page-locking."""

from __future__ import annotations

import torch
from conformance.transport import DTYPES, assert_close, expected, values

from bench.gpu.runner import RankRun
from sirtaki.comm.nccl_streams.transport import (
    CommunicatorPool,
    NcclHierarchicalTransport,
    NcclTransport,
    Opener,
    Scope,
)
from sirtaki.comm.plan import NcclWay
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp, StreamSpec
from sirtaki.errors import PlanError

STREAMS = [StreamSpec(0, 512), StreamSpec(1, 8 * 512)]  # With 1 and with 8 CTAs.
SCALES = (1.0, 0.25)
MARGIN = 128
"""Number of elements on both sides of a range.

In every dtype, they are a multiple of 256 bytes, to which units are aligned.
"""


def run(run: RankRun) -> None:
    """Open two communicators with different limits on CTAs, use and close them, twice; then page-lock memory."""
    place = run.place
    opener: Opener | None = None
    with run.check("NCCL can be used") as found:
        opener = place.opener(run.control)
        found |= {"max_streams": opener.max_streams, "ways": [way.value for way in opener.ways]}
    if opener is None:
        return
    pool = CommunicatorPool(opener, limit=24, worst=lambda value: value)
    flat = NcclTransport(pool, place.device, opener=opener)
    tree = NcclHierarchicalTransport(pool, place.device, opener=opener, local_size=1, local_rank=0)
    with run.check("two communicators with limits on CTAs are opened") as found:
        before = place.used_bytes()
        flat.open_streams(STREAMS)
        found |= {"open": [str(key) for key in pool.open], "bytes_each": (place.used_bytes() - before) / 2}
    for dtype in DTYPES:
        with run.check(f"reductions of {dtype}"):
            for stream in STREAMS:
                reduces(run, flat, stream, dtype)
    with run.check("reduce-scatter and all-gather"):
        tree.open_streams(STREAMS[:1])
        for dtype in (torch.float32, torch.bfloat16):
            reduces(run, tree, STREAMS[0], dtype)
    with run.check("no communicator reports an error"):
        pool.check()
        assert {key.scope for key in pool.open} == set(Scope)
    with run.check("closed communicators are opened again"):
        place.device.synchronise()
        pool.close()
        assert not pool.open
        flat.open_streams(STREAMS)
        reduces(run, flat, STREAMS[1], torch.float32)
    with run.check("NCCL reads algorithm and protocol for each communicator") as found:
        for way in NcclWay:
            spec = StreamSpec(2, 512, way)
            try:
                flat.open_streams([spec])
            except PlanError as err:
                found[way.value] = str(err)[:300]
            else:
                reduces(run, flat, spec, torch.float32)
                found[way.value] = "opened"
    place.device.synchronise()
    pool.close()
    page_locked(run)


def reduces(run: RankRun, transport: NcclTransport, stream: StreamSpec, dtype: torch.dtype) -> None:
    """Reduce by every operation, with and without a factor, and compare with float64 on the host."""
    device, control = run.place.device, run.control
    for numel in (1, 1021, 65536):
        for op in ReduceOp:
            for scale in SCALES if op is ReduceOp.SUM and dtype.is_floating_point else (1.0,):
                tensor = torch.zeros(numel + 2 * MARGIN, dtype=dtype, device=run.place.torch_device)
                tensor[MARGIN:-MARGIN].copy_(values(control.rank, numel, dtype))
                stop = MARGIN + numel
                work = transport.all_reduce(FlatBuffer(tensor), MARGIN, stop, stream=stream, op=op, scale=scale)
                assert work.wait(5.0)
                device.synchronise()
                wanted = expected(control.size, numel, dtype, op, scale)
                assert_close(tensor[MARGIN:stop], wanted, dtype, control.size)
                outside = torch.cat([tensor[:MARGIN], tensor[stop:]])
                assert outside.count_nonzero().item() == 0, "elements outside the range were written"


def page_locked(run: RankRun) -> None:
    """Page-lock existing memory, and use the GPU after CUDA has refused to page-lock it twice."""
    place = run.place
    memory = torch.zeros(1 << 22)
    with run.check("existing memory is page-locked") as found:
        place.device.pin(memory)
        found["pinned"] = place.is_pinned(memory)
        assert found["pinned"]
        there = torch.ones(1 << 22, device=place.torch_device)
        found["locked_s"] = place.seconds(lambda: memory.copy_(there, non_blocking=True), 20)
        unlocked = torch.zeros(1 << 22)
        found["unlocked_s"] = place.seconds(lambda: unlocked.copy_(there), 20)
        place.device.synchronise()
        assert bool((memory == 1).all())
    with run.check("the GPU goes on after CUDA has refused to page-lock memory twice"):
        place.device.pin(memory)
        assert torch.ones(10, device=place.torch_device).sum().item() == 10
