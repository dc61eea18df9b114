"""Checks that all ranks begin with the same model, and that gradients are finite."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.buffers import dense_strides
from sirtaki.errors import MismatchError

logger = logging.getLogger(__name__)

Named = tuple[str, torch.Tensor]

SAMPLE = 128
"""Number of elements of each parameter whose values ranks compare. They are evenly spread over the parameter."""


def require_same_model(control: ControlPlane, named: Sequence[Named]) -> None:
    """Reject models that differ between ranks in a parameter's name, shape, strides, dtype or device type. Collective.

    Raises:
        MismatchError: on all ranks. The message describes the first parameter that differs, on rank 0 and on the first
            rank that disagrees with rank 0.
    """
    texts = [_describe(name, param) for name, param in named]
    count = np.array([len(texts)], dtype=np.float64)
    fewest, most = int(control.minimum(count)[0]), int(control.maximum(count)[0])
    digests = np.array([zlib.crc32(text.encode()) for text in texts[:fewest]], dtype=np.float64)
    first = _first_difference(control, digests)
    if first is None and fewest == most:
        return
    place = fewest if first is None else first
    found = control.all_gather(
        texts[place] if place < len(texts) else f"missing (the model has only {len(texts)} parameters)"
    )
    other = next(rank for rank, text in enumerate(found) if text != found[0])
    raise MismatchError(
        f"the ranks disagree about the model: parameter {place} (counted from 0) is {found[0]} on rank 0, but "
        f"{found[other]} on rank {other}; all ranks must build the same model, with the same parameter names"
    )


def _describe(name: str, param: torch.Tensor) -> str:
    strides = dense_strides(param)
    usual = torch.empty(param.shape, dtype=param.dtype, device="meta").stride()
    layout = "" if strides == usual else f" with strides {strides}"
    dtype = str(param.dtype).removeprefix("torch.")
    return f"{name!r} of shape {tuple(param.shape)}{layout}, {dtype} on {param.device.type}"


def warn_of_different_values(control: ControlPlane, named: Sequence[Named]) -> None:
    """Log a warning on rank 0 if parameter values differ between ranks. Collective. Call before the first update."""
    if not named:
        return
    first = _first_difference(control, checksums([param for _, param in named]))
    if first is not None and control.rank == 0:
        logger.warning(
            "the ranks begin with different parameters (the first that differs is %r); only gradients are averaged, so "
            "the models stay different: call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training",
            named[first][0],
        )


@torch.no_grad()
def checksums(params: Sequence[torch.Tensor]) -> npt.NDArray[np.float64]:
    """Return one checksum for each parameter, computed from the bits of a sample of its elements, `(n_params,)`.

    The samples are copied to the host in one transfer, so that the host waits for the device once.
    """
    samples = [_sample(param) for param in params]
    device = samples[0].device
    bits = torch.cat([sample.to(device) for sample in samples]).cpu().numpy()
    ends = np.cumsum([sample.numel() for sample in samples])
    return np.array(
        [
            int.from_bytes(hashlib.blake2b(bits[end - sample.numel() : end].tobytes(), digest_size=6).digest())
            for sample, end in zip(samples, ends, strict=True)
        ],
        dtype=np.float64,
    )


def _sample(param: torch.Tensor) -> torch.Tensor:
    """Return evenly spread elements of a parameter as float64, which represents all smaller types exactly."""
    values = torch.view_as_real(param) if param.is_complex() else param.detach()
    if not values.is_contiguous():
        values = values.as_strided((values.numel(),), (1,)) if values.numel() and _is_dense(values) else values
    flat = values.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].double()


def _is_dense(values: torch.Tensor) -> bool:
    """Return whether the elements fill a contiguous range of memory, in any order of the dimensions."""
    return values.stride() == torch.empty_like(values, device="meta").stride()


def _first_difference(control: ControlPlane, values: npt.NDArray[np.float64]) -> int | None:
    """Return the first index at which values differ between ranks; None if all are equal. Collective."""
    different = np.flatnonzero(control.minimum(values) != control.maximum(values))
    return int(different[0]) if different.size else None


SHOWN = 5
"""Maximum number of gradients that the error log lists for each rank."""


class NanCheck:
    """Detector of NaN and infinite elements in this rank's gradients before they are reduced."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._found: list[str] = []
        self._iteration = 0
        self._was_clean = True

    def inspect(self, name: str, gradient: torch.Tensor) -> None:
        """Count the NaN and infinite elements of a ready local gradient. Blocks until a GPU has computed the counts."""
        values = gradient._values() if gradient.is_sparse else gradient
        if bool(values.sum().isfinite()) or bool((finite := values.isfinite()).all()):
            return
        nans, others = int(values.isnan().sum()), int((~finite).sum())
        parts = [f"{nans} NaN" if nans else "", f"{others - nans} infinite" if others > nans else ""]
        self._found.append(f"{name} ({' and '.join(filter(None, parts))} of {values.numel()} elements)")

    def finish(self, passes_left: Sequence[int], named: Sequence[Named]) -> None:
        """Log on rank 0 which ranks have found NaN or infinite elements in this iteration. Collective.

        Nothing is logged if the iteration before also had such elements, because they have reached the parameters.

        Args:
            passes_left: for each parameter, the backward passes that are left before its gradient is reduced,
                `(n_params,)`; 0 = its gradient was inspected.
            named: all parameters with their names.
        """
        for left, (name, param) in zip(passes_left, named, strict=True):
            if left and param.grad is not None:
                self.inspect(name, param.grad)
        found = self._control.all_gather(self._found)
        if any(found) and self._was_clean and self._control.rank == 0:
            lines = [
                f"  rank {rank}: {', '.join(names[:SHOWN])}"
                + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
                for rank, names in enumerate(found)
                if names
            ]
            logger.error(
                "NaN or infinite gradients appeared in iteration %d, before their all-reduce; training continues. They "
                "appeared on:\n%s",
                self._iteration,
                "\n".join(lines),
            )
        self._was_clean = not any(found)
        self._found.clear()
        self._iteration += 1
