"""A network over a synchroniser without a tuner, to measure what single settings cost."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.plan import GradientLayout, Route

if TYPE_CHECKING:
    from sirtaki.engine.job import Job


class Bare:
    """Runs what it is told, and says how long it took.

    Attributes:
        space: what may be chosen, and `narrowed` by the probes.
        default: what would run untuned.
        probes: of each route.
        known: the planners' model; None where none fits.
    """

    def __init__(self, current: Job, model: nn.Module, batch: torch.Tensor, *, only: Route | None = None) -> None:
        """Collective: trains until the order of the gradients is known, then probes as the warm-up does.

        Args:
            current: the job.
            model: the network.
            batch: its input.
            only: the route that is used, None = all that there are.
        """
        from sirtaki.comm.gradients.buffers import Reduction
        from sirtaki.comm.gradients.synchroniser import Synchroniser
        from sirtaki.comm.router import Router
        from sirtaki.engine.tuning.plans import default_knobs, knob_space
        from sirtaki.engine.tuning.probes import measure

        self._control = current.control
        self._model, self._batch = model, batch
        self._params = list(model.parameters())
        self._router = Router(self._control, timeout_s=current.settings.transport_timeout_s)
        total_bytes = sum(param.numel() * param.itemsize for param in self._params)
        space = knob_space(self._router, current.settings, total_bytes)
        if only is not None:
            space = replace(space, routes=(only,))
        self.default = default_knobs(space, total_bytes=total_bytes, one_node=self._control.one_node)
        self._sync = Synchroniser(
            self._params,
            [str(number) for number in range(len(self._params))],
            control=self._control,
            router=self._router,
            reduction=Reduction(postscale=1 / self._control.size),
            default_plan=self.default.to_plan,
        )
        for index, param in enumerate(self._params):
            ready = partial(self._sync.ready, index)
            param.register_post_accumulate_grad_hook(lambda param, ready=ready: ready(param.grad, param.grad._version))  # type: ignore[no-untyped-call]
        report = self._step()
        while not report.profiled:
            report = self._step()
        found = measure(self._control, self._router, space, default=self.default, span_s=report.span_s)
        self.space, self.narrowed, self.probes = found.space, found.promising, found.links
        ready_s = [*self._sync.in_layout_order(report.ready_s), report.backward_s]
        self.known = found.model(self.layout, ready_s, report.backward_s, between_s=math.nan)

    @property
    def layout(self) -> GradientLayout:
        """Of the only flat buffer, the control flags included."""
        return self._sync.layouts[0]

    def _step(self) -> Any:
        self._model(self._batch).sum().backward()
        report = self._sync.finish()
        for param in self._params:
            param.grad = None
        return report

    def measure(self, knobs: Knobs) -> tuple[float, float]:
        """Collective: span and time of one step with this setting, after one that does not count."""
        self._sync.set_plans([knobs.to_plan(self.layout)])
        self._step()
        begin_s = time.perf_counter()
        span_s = self._step().span_s
        step_s = time.perf_counter() - begin_s
        return float(self._control.minimum(np.array([span_s]))[0]), float(self._control.maximum(np.array([step_s]))[0])

    def close(self) -> None:
        """Collective."""
        self._sync.close()
        self._router.close()
