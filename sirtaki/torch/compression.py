"""Compression of tensors for communication: Horovod's, and bfloat16, int8, fp8, top-k, PowerSGD and user codecs."""

from typing import Any, ClassVar

import torch

from sirtaki.comm.compress import Codec, PowerSgd, Quantised, Scheme, TopK, scheme_of
from sirtaki.errors import ConfigError


class Compressor:
    """Base class of compressors: `compress` is called before a tensor is sent, and `decompress` after it is received.

    Subclasses override both methods. A compressed tensor must keep its shape.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and a context that is passed to `decompress`.

        The context has any type, and is private to the compressor.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the decompressed tensor, with the shape and the dtype that it had before `compress`.

        Args:
            tensor: the received tensor.
            ctx: the context that `compress` has returned (of any type).
        """
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
    """Compressor that sends floating-point tensors as bfloat16, with float32's range and 3 bits less than float16."""

    wire = torch.bfloat16


class LossyCompressor(Compressor):
    """Lossy compressor of gradients with error feedback: the compression error of a step is added to the next gradient.

    It can be used with `DistributedOptimizer` and `ddp.attach`. `fsdp.attach` accepts only compressors that quantise
    each number separately, and uses them without error feedback.
    """

    def __init__(self, scheme: Scheme) -> None:
        """Store `scheme`, the algorithm that compresses gradients and sums them over ranks."""
        self.scheme = scheme

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Raise an exception, because error feedback needs the gradients of an optimizer, not a single tensor.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "this compression adds each step's error to the next step (error feedback), so it requires "
            "DistributedOptimizer or ddp.attach; for a single allreduce, use Compression.none, .fp16 or .bf16"
        )

    decompress = compress  # type: ignore[assignment]  # raises the same exception


Choice = type[Compressor] | LossyCompressor | Codec
"""Type of the argument `compression=` of `DistributedOptimizer` and `ddp.attach`."""


def reduction_options(compression: Choice) -> dict[str, Any]:
    """Return the fields of a `Reduction` (options of a gradient reduction) that the argument `compression=` sets.

    Raises:
        ConfigError: `compression` is invalid.
    """
    if isinstance(compression, LossyCompressor):
        return {"compression": compression.scheme}
    if isinstance(compression, type) and issubclass(compression, NoneCompressor):
        return {}
    if isinstance(compression, type) and issubclass(compression, _CastCompressor):
        # Set the dtype to send for every floating-point dtype, even if no parameter of the optimizer has it. So
        # optimizers with equal compression have equal options, which is required if they share a parameter.
        floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        return {"wire_dtype": tuple((dtype, compression.wire) for dtype in floats)}
    if isinstance(compression, Codec) and not isinstance(compression, type):
        return {"compression": Quantised(compression)}
    raise ConfigError(
        "compression= must be a member of hvd.Compression, or an object with the methods pack(values) and "
        f"unpack(packed, count), not {compression!r}"
    )


class Compression:
    """Compressors to choose from for the argument `compression=`.

    `int8`, `fp8`, `topk` and `powersgd` are lossy, with error feedback: the compression error of a step is added to the
    next gradient. They are for `DistributedOptimizer` and `ddp.attach`, and compress communication between hosts, and
    over NCCL. Between ranks that share memory, gradients are sent uncompressed. `fsdp.attach` accepts all but `topk`
    and `powersgd`, and uses no error feedback.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = LossyCompressor(scheme_of("int8"))
    fp8 = LossyCompressor(scheme_of("fp8"))

    @staticmethod
    def topk(ratio: float = 0.01) -> LossyCompressor:
        """Send only the fraction `ratio` of each rank's gradient elements: those with the largest magnitude."""
        return LossyCompressor(TopK(ratio))

    @staticmethod
    def powersgd(rank: int = 4) -> LossyCompressor:
        """Approximate each gradient matrix by two factors of the (matrix) rank `rank`, and send the factors.

        Vectors and small matrices are sent uncompressed.
        """
        return LossyCompressor(PowerSgd(rank))
