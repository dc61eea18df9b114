"""How tensors are made smaller for the wire: Horovod's `Compression`, and what it has not: bfloat16, int8, fp8, top-k,
PowerSGD and codecs of the user's own.
"""

from typing import Any, ClassVar

import torch

from sirtaki.comm.compress import Codec, PowerSgd, Quantised, Scheme, TopK, scheme_of
from sirtaki.errors import ConfigError


class Compressor:
    """Base of compressors; a user's own one overrides both methods and keeps the tensor's shape."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as it travels, and what `decompress` needs to know (Any: the compressor's own affair)."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as it was, of the same shape."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    """Floating tensors travel in another dtype."""

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
    """Floating tensors travel as float16."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Floating tensors travel as bfloat16: the range of float32, an eighth of float16's precision."""

    wire = torch.bfloat16


class LossyCompressor(Compressor):
    """Gradients lose something on their way, which is given back in the next step; see `sirtaki.comm.compress`.

    For `DistributedOptimizer` and `ddp.attach`. `fsdp.attach` takes those that pack numbers one by one, without giving
    anything back.
    """

    def __init__(self, scheme: Scheme) -> None:
        """`scheme`: how they are added up."""
        self.scheme = scheme

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Not possible for one tensor by itself.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "this compression needs to know what was lost in the step before: it goes with DistributedOptimizer and "
            "ddp.attach; single operations take Compression.none, .fp16 or .bf16"
        )

    decompress = compress  # type: ignore[assignment]  # neither


Choice = type[Compressor] | LossyCompressor | Codec
"""What `compression=` of `DistributedOptimizer` and `ddp.attach` takes."""


def reduction_options(compression: Choice) -> dict[str, Any]:
    """The fields of a `Reduction` that a choice means.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(compression, LossyCompressor):
        return {"compression": compression.scheme}
    if isinstance(compression, type) and issubclass(compression, NoneCompressor):
        return {}
    if isinstance(compression, type) and issubclass(compression, _CastCompressor):
        # Of all parameters that there are or may be, so that optimizers of one compression agree on those they share.
        floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        return {"wire_dtype": tuple((dtype, compression.wire) for dtype in floats)}
    if isinstance(compression, Codec) and not isinstance(compression, type):
        return {"compression": Quantised(compression)}
    raise ConfigError(
        "compression= takes one of hvd.Compression's, or an object with the methods pack(values) and "
        f"unpack(packed, count), not {compression!r}"
    )


class Compression:
    """The choices for `compression=`.

    The last four lose something of each gradient, and give it back in the next step (error feedback). They are for
    `DistributedOptimizer` and `ddp.attach`, and compress what hosts send to each other: between ranks that share
    memory, and on GPUs, gradients travel as they are. `fsdp.attach` takes all but the last two, and gives nothing back.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = LossyCompressor(scheme_of("int8"))
    fp8 = LossyCompressor(scheme_of("fp8"))

    @staticmethod
    def topk(ratio: float = 0.01) -> LossyCompressor:
        """The largest numbers of each rank's gradients: `ratio` of them."""
        return LossyCompressor(TopK(ratio))

    @staticmethod
    def powersgd(rank: int = 4) -> LossyCompressor:
        """Matrices as products of two with `rank` columns; vectors and small matrices travel as they are."""
        return LossyCompressor(PowerSgd(rank))
