"""Where each gradient lies in its flat buffer: the order and offsets of all gradients of one dtype and device.

Without torch: plans, arms, planners and the simulator need layouts, too.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from sirtaki.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class GradientLayout:
    """Gradients one behind the other, in the order in which they are expected to become ready.

    Attributes:
        sizes: elements of each gradient, `(n_gradients,)`; zero is allowed.
        itemsize_bytes: bytes of one element as it travels.
        dtype: name of the element type as it travels, such as "float32".
        device: "cpu" or "cuda".
        names: parameter names, `(n_gradients,)`, for messages and traces; empty if unknown.
    """

    sizes: tuple[int, ...]
    itemsize_bytes: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.sizes):
            raise PlanError(f"gradient sizes must not be negative: {min(self.sizes)}")
        if self.itemsize_bytes <= 0:
            raise PlanError(f"itemsize_bytes must be positive, not {self.itemsize_bytes}")
        if self.names and len(self.names) != len(self.sizes):
            raise PlanError(f"{len(self.names)} names for {len(self.sizes)} gradients")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each gradient and, last, the total: `(n_gradients + 1,)`."""
        return (0, *accumulate(self.sizes))

    @property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return self.offsets[-1]

    @property
    def total_bytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.numel * self.itemsize_bytes

    def describe(self, start: int, stop: int) -> str:
        """The gradients with elements in `[start, stop)`, in words; needs names."""
        first = bisect_right(self.offsets, start) - 1
        last = max(first, bisect_left(self.offsets, stop) - 1)
        if first == last:
            return self.names[first]
        return f"{self.names[first]} … {self.names[last]} ({last - first + 1})"

    def reordered(self, order: Sequence[int]) -> "GradientLayout":
        """The layout whose i-th gradient is this one's `order[i]`-th."""
        if sorted(order) != list(range(len(self.sizes))):
            raise PlanError(f"an order of {len(self.sizes)} gradients must name each of them once")
        return GradientLayout(
            sizes=tuple(self.sizes[i] for i in order),
            itemsize_bytes=self.itemsize_bytes,
            dtype=self.dtype,
            device=self.device,
            names=tuple(self.names[i] for i in order) if self.names else (),
        )
