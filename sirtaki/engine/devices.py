"""Where a model's gradients are, and what carries them from there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sirtaki.comm.plan import TransportKind
from sirtaki.comm.router import Router

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.settings import Settings

logger = logging.getLogger(__name__)


def open_router(control: ControlPlane, settings: Settings, params: Sequence[torch.Tensor]) -> Router:
    """Collective: the router for the gradients of `params`, on whose first GPU they are reduced if any are on one.

    NCCL carries what is on GPUs, unless it is not there, ranks share a GPU, or `SIRTAKI_TRANSPORT=staged`.
    """
    others = {param.device.type for param in params} - {"cpu", "cuda"}
    if others:
        logger.warning("gradients on %s travel through host memory", ", ".join(sorted(others)))
    on_gpus = [param.device for param in params if param.device.type == "cuda"]
    if not on_gpus:
        return Router(control, timeout_s=settings.transport_timeout_s)
    from sirtaki.comm.nccl_streams.cuda_device import cuda_device
    from sirtaki.comm.nccl_streams.process_group import find_nccl

    index = on_gpus[0].index
    device = cuda_device(torch.cuda.current_device() if index is None else index)
    wanted = settings.transport
    if wanted is TransportKind.STAGED:
        return Router(control, timeout_s=settings.transport_timeout_s, device=device)
    nccl = find_nccl(control, device, forced=wanted is TransportKind.NCCL, timeout_s=settings.transport_timeout_s)
    return Router(control, timeout_s=settings.transport_timeout_s, device=device, nccl=nccl)
