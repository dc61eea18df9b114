"""Parcels of an exchange: where they lie, and how they are cut."""

import numpy as np
import pytest

from sirtaki.comm.transports.contract import Parcels

LENGTHS = np.array([[1, 2, 3], [0, 16, 5], [7, 0, 0]])


def test_parcels_lie_one_behind_the_other_by_receiver_and_arrive_by_sender() -> None:
    parcels = Parcels(LENGTHS)
    assert parcels.sent_by(0) == [(0, 1), (1, 3), (3, 6)]
    assert parcels.sent_by(2) == [(0, 7), (7, 7), (7, 7)]
    assert parcels.received_by(1) == [2, 16, 0]
    assert parcels.largest_outgoing_bytes == 21
    assert not parcels.empty


def test_a_parcel_for_all_is_there_once() -> None:
    parcels = Parcels.to_all([4, 0, 9])
    assert parcels.sent_by(2) == [(0, 9)] * 3
    assert parcels.received_by(1) == [4, 0, 9]
    assert parcels.largest_outgoing_bytes == 9


def test_nobody_sends_anything() -> None:
    assert Parcels.to_all([0, 0]).empty


@pytest.mark.parametrize("of", [1, 2, 5, 30])
def test_pieces_make_up_the_whole(of: int) -> None:
    for parcels in (Parcels(LENGTHS), Parcels.to_all([4, 0, 9])):
        pieces = [parcels.piece(number, of) for number in range(of)]
        assert np.array_equal(sum(piece.lengths for piece in pieces), parcels.lengths)
        assert all(piece.shared == parcels.shared for piece in pieces)
        whole = -(-parcels.lengths // of)
        assert all((piece.lengths <= whole).all() for piece in pieces)
