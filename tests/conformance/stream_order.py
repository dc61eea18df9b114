"""Reductions of gradients that are written on any streams of a fake GPU, which checks their order."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from fakes.cuda import FakeCuda, Stream

from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.control.members import alone
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import cuda_device
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.nccl_streams.transport import find_nccl
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.router import Router

SHAPES = [(30, 20), (20,), (64, 64), (3,), (999,), (50,)]
WARM_UP = 3
ITERATIONS = 7


class Training:
    """A model of one rank on a fake GPU. Its gradients may be written on any stream."""

    def __init__(
        self,
        cuda: FakeCuda,
        *,
        kind: TransportKind = TransportKind.NCCL,
        dtype: torch.dtype = torch.float32,
        unused_as_none: bool = False,
        streams: int = 3,
        scale: float = 0.5,
        control: ControlPlane | None = None,
        algorithm: Algorithm = Algorithm.FLAT,
    ) -> None:
        """Create the model. Collective over the ranks of `control`; None = this process is the only rank."""
        self.cuda, self.device = cuda, cuda_device(cuda.index)
        self.control = control or ControlPlane(alone())
        nccl = None
        if kind is TransportKind.NCCL:
            nccl = find_nccl(self.control, self.device, forced=False, timeout_s=30.0)
            assert nccl is not None
        self.router = Router(self.control, timeout_s=30.0, device=self.device, nccl=nccl)
        self.params = [torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in SHAPES]
        self.sync = GradientPipeline(
            self.params,
            [f"p{index}" for index in range(len(SHAPES))],
            control=self.control,
            router=self.router,
            reduction=Reduction(postscale=scale),
            default_plan=Knobs(
                unit_bytes=4000,
                streams=min(streams, self.router.max_streams([(kind, algorithm)])),
                transport=kind,
                algorithm=algorithm,
            ).to_plan,
            unused_as_none=unused_as_none,
        )

    def iteration(
        self,
        stream_of: Callable[[int], Stream],
        step_on: Stream,
        *,
        absent: Sequence[int] = (),
        in_order: bool = True,
        values: float = 0.0,
    ) -> None:
        """Run an iteration. As in autograd, leaf streams wait for the caller's stream, which waits for them at last."""
        cuda, main = self.cuda, self.cuda.current_stream()
        for param in self.params:
            param.grad = None
        present = [index for index in reversed(range(len(SHAPES))) if index not in absent]
        used = {stream_of(index) for index in present}
        for stream in used:
            stream.wait_stream(main)
        at_once: Any = None
        come: list[torch.Tensor] = []
        for count, index in enumerate(present, 1):
            with cuda.on(stream_of(index)):
                param = self.params[index]
                param.grad = torch.full_like(param, float(index + 1) + values)
                if not in_order or absent:
                    self.sync.ready(index, param.grad, param.grad._version)
                    continue
                # Like the hook of GradientHooks: mark gradients ready, and launch where a unit may be complete.
                at_once = self.sync.begin_pass() if at_once is None else at_once
                self.device.notice_stream()
                come.append(param)
                if count in at_once:
                    if not self.sync.ready_in_order(come):
                        for each in come:
                            place = next(i for i, own in enumerate(self.params) if own is each)
                            self.sync.ready(place, each.grad, each.grad._version)  # type: ignore[arg-type, union-attr]
                    come = []
        for stream in used:
            main.wait_stream(stream)
        step_on.wait_stream(main)
        with cuda.on(step_on):
            if self.sync.can_reduce:
                self.sync.reduce(None)
            self.sync.finish()
            for param in self.params:
                if param.grad is not None:
                    param.data.add_(param.grad)  # the update
        torch.ones(100, device="cuda")  # in parallel with the update, perhaps in memory of freed gradients
        main.wait_stream(step_on)
        cuda.next_iteration()

    def run(self, stream_of: Callable[[int], Stream], step_on: Stream, **options: Any) -> None:
        for number in range(ITERATIONS):
            self.cuda.steady = number >= WARM_UP
            self.iteration(stream_of, step_on, **options)
        self.cuda.steady = False

    def close(self) -> None:
        self.device.synchronise()
        for param in self.params:
            param.grad = None
        self.sync.close()
        self.router.close()
        self.control.close()
