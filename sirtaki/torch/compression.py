"""Compression of tensors for communication: Horovod's `Compression`, and bfloat16, int8, fp8, top-k, PowerSGD and user
codecs.
"""

from typing import Any, ClassVar

import torch

from sirtaki.comm.compress import Codec, PowerSgd, Quantised, Scheme, TopK, scheme_of
from sirtaki.errors import ConfigError


class Compressor:
    """Base class of compressors. Subclasses override both methods and keep the tensor's shape."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context for `decompress` (Any: private to the compressor)."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the original tensor, with its shape."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Compressor that sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor unchanged."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor unchanged."""
        return tensor


class _CastCompressor(Compressor):
    """Compressor that sends floating-point tensors in another dtype."""

    wire: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype.is_floating_point:
            return tensor.to(cls.wire), tensor.dtype
        return tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Compressor that sends floating-point tensors as float16."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Compressor that sends floating-point tensors as bfloat16: range of float32, an eighth of float16's precision."""

    wire = torch.bfloat16


class LossyCompressor(Compressor):
    """Lossy compressor of gradients with error feedback: what is lost is added in the next step. See
    `sirtaki.comm.compress`.

    For `DistributedOptimizer` and `ddp.attach`. `fsdp.attach` accepts those that quantise numbers separately, and uses
    no error feedback.
    """

    def __init__(self, scheme: Scheme) -> None:
        """`scheme`: how compressed gradients are summed."""
        self.scheme = scheme

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Reject the compression of a single tensor, which has no error feedback.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "this compression uses error feedback from the last step, so it requires DistributedOptimizer or "
            "ddp.attach; single operations support Compression.none, .fp16 and .bf16"
        )

    decompress = compress  # type: ignore[assignment]  # rejected as well


Choice = type[Compressor] | LossyCompressor | Codec
"""Type of `compression=` in `DistributedOptimizer` and `ddp.attach`."""


def reduction_options(compression: Choice) -> dict[str, Any]:
    """Return the fields of a `Reduction` for a choice.

    Raises:
        ConfigError: `compression` is invalid.
    """
    if isinstance(compression, LossyCompressor):
        return {"compression": compression.scheme}
    if isinstance(compression, type) and issubclass(compression, NoneCompressor):
        return {}
    if isinstance(compression, type) and issubclass(compression, _CastCompressor):
        # For all floating dtypes, so that optimizers with equal compression agree about shared parameters.
        floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        return {"wire_dtype": tuple((dtype, compression.wire) for dtype in floats)}
    if isinstance(compression, Codec) and not isinstance(compression, type):
        return {"compression": Quantised(compression)}
    raise ConfigError(
        "compression= must be a member of hvd.Compression, or an object with the methods pack(values) and "
        f"unpack(packed, count), not {compression!r}"
    )


class Compression:
    """Choices for `compression=`.

    The last four are lossy, with error feedback. They are for `DistributedOptimizer` and `ddp.attach`, and compress
    communication between hosts. Between ranks that share memory, and on GPUs, gradients are sent uncompressed.
    `fsdp.attach` accepts all but the last two, without error feedback.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = LossyCompressor(scheme_of("int8"))
    fp8 = LossyCompressor(scheme_of("fp8"))

    @staticmethod
    def topk(ratio: float = 0.01) -> LossyCompressor:
        """Send the largest values of each rank's gradients: a share of `ratio`."""
        return LossyCompressor(TopK(ratio))

    @staticmethod
    def powersgd(rank: int = 4) -> LossyCompressor:
        """Send matrices as products of two matrices with `rank` columns. Vectors and small matrices are sent
        uncompressed.
        """
        return LossyCompressor(PowerSgd(rank))
