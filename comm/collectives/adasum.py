"""Adasum: combining gradients by how far they point the same way.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021: two gradients at right angles are
added, two parallel ones averaged, and everything between goes smoothly (eq. (3) there); more than two are combined
pairwise in a balanced tree. Recursive doubling does that: after the round of distance d, groups of 2d ranks hold the
same vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sirtaki.comm.control.communicator import Communicator, Test


def combine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b` of two vectors; one that is zero leaves the other as it is."""
    a, b = one.double(), other.double()
    product, a_square, b_square = float(a @ b), float(a @ a), float(b @ b)
    a_share = 1.0 - product / (2 * a_square) if a_square else 1.0
    b_share = 1.0 - product / (2 * b_square) if b_square else 1.0
    return (a_share * a + b_share * b).to(one.dtype)


def adasum_(vector: torch.Tensor, *, comm: Communicator, wait: Callable[[Test], None]) -> None:
    """Collective: replaces a contiguous 1-d CPU vector by the Adasum of all ranks'; their number is a power of two."""
    distance = 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        theirs = torch.empty_like(vector)
        receiving = comm.receive(theirs.numpy(), partner)
        wait(comm.send(vector.numpy(), partner))
        wait(receiving)
        # Both partners compute the same expression in the same order, so they get the same bits.
        low, high = (vector, theirs) if comm.rank < partner else (theirs, vector)
        vector.copy_(combine(low, high))
        distance *= 2
