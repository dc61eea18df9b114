"""An eager operation under way, and what the timeline and the recorder are told of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from sirtaki.comm import timeline
from sirtaki.comm.recorder import Recorder, TracedOperation
from sirtaki.comm.transports.mpi import ThreadWork

from .requests import Signature


class EagerWork(ThreadWork):
    """An eager operation under way."""

    def __init__(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.signature, self.tensors = signature, tensors
        self.digest = signature.digest()
        self.submitted_s = time.monotonic()
        self.results: list[torch.Tensor] = []
        self.written = _written(tensors)


def _written(tensors: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
    """Marks the point of this thread's CUDA stream at which the tensors have their values."""
    if not tensors or tensors[0].device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    event.record(torch.cuda.current_stream(tensors[0].device))
    return event


def trace_operations(
    trace: timeline.Timeline, signatures: Sequence[Signature], works: Sequence[EagerWork | None], begin_s: float
) -> None:
    """Tells the timeline of operations that have been performed together, and how long they were negotiated."""
    end_s = time.perf_counter()
    ages_s = time.monotonic() - end_s  # of one clock against the other
    for signature, work in zip(signatures, works, strict=True):
        if work is not None:
            submitted_s = work.submitted_s - ages_s
            trace.overlapping(f"NEGOTIATE_{signature.kind.value}", submitted_s, begin_s, operation=signature.name)
    names = ", ".join(signature.name for signature in signatures)
    trace.span("eager", signatures[0].kind.value, begin_s, end_s, names=names)
    for signature in signatures:
        trace.span("eager", signature.name, begin_s, end_s)


def record_operations(recorder: Recorder, works: Sequence[EagerWork | None], agreed_s: float) -> None:
    """Tells the recorder of this rank's operations among those that have been performed together."""
    done_s = time.perf_counter()
    ages_s = time.monotonic() - done_s  # of one clock against the other
    for work in works:
        if work is not None:
            recorder.operation(
                TracedOperation(
                    name=work.signature.name,
                    kind=work.signature.kind.value,
                    submitted_s=work.submitted_s - ages_s,
                    agreed_s=agreed_s,
                    done_s=done_s,
                    n_bytes=sum(tensor.numel() * tensor.element_size() for tensor in work.tensors),
                )
            )
