"""The random generators of this rank, which are no other's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """Of Python's, NumPy's and PyTorch's global generators (Any: as those give it)."""

    python: Any
    numpy: Any
    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """As the generators are."""
        device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), device)

    def plain(self) -> dict[str, Any]:
        """The same in types that need no Sirtaki to be unpickled."""
        return {"python": self.python, "numpy": self.numpy, "host": self.host, "device": self.device}

    def put_back(self) -> None:
        """The generators go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
