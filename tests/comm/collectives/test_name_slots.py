"""Names and their bits: the same on ranks that make the same calls, and the longest unused name gives way."""

import random

from sirtaki.comm.collectives.engine import NameSlots
from sirtaki.comm.collectives.operations import Kind, Signature


def signature(name: str, *, once: bool = False, by_all: bool = False, op: str = "sum") -> Signature:
    return Signature(
        name=name, kind=Kind.ALLREDUCE, shapes=((1,),), dtypes=("float32",), op=op, once=once, by_all=by_all
    )


def slots(capacity: int, *names: str) -> NameSlots:
    made = NameSlots(capacity)
    for name in names:
        made.remember(signature(name), signature(name).digest())
    return made


def test_names_get_bits_one_after_the_other_and_are_found_by_them() -> None:
    made = slots(4, "a", "b", "c")
    assert [made.slot(name) for name in "abcd"] == [0, 1, 2, None]
    assert made.known([2, 0, 3]) == {"c": signature("c"), "a": signature("a")}
    assert made.known([]) == {}


def test_what_is_known_of_a_name_is_replaced_and_its_bit_stays() -> None:
    made = slots(4, "a", "b")
    made.remember(signature("a", op="max"), 5)
    assert made.slot("a") == 0
    assert made.digest("a") == 5
    assert made.known([0])["a"].op == "max"
    assert made.digest("b") == signature("b").digest()
    assert made.digest("nobody") is None


def test_a_name_that_comes_once_is_not_worth_a_bit_unless_it_has_one() -> None:
    made = slots(2, "a")
    made.remember(signature("once", once=True), 1)
    assert made.slot("once") is None
    made.remember(signature("a", once=True), 7)
    assert made.digest("a") == 7


def test_the_name_that_was_not_used_for_longest_loses_its_bit_to_a_new_one() -> None:
    made = slots(3, "a", "b", "c")
    made.touch("a")
    made.touch("unknown")
    made.remember(signature("d"), 1)
    assert (made.slot("b"), made.slot("d")) == (None, 1)
    assert made.digest("b") is None
    made.remember(signature("e"), 1)
    assert (made.slot("c"), made.slot("e")) == (None, 2)
    assert made.slot("a") == 0


def test_remembering_a_known_name_again_does_not_count_as_its_use() -> None:
    # On every rank alike: only what was performed is touched, and that all ranks perform together.
    made = slots(2, "a", "b")
    made.remember(signature("a"), 3)
    made.remember(signature("c"), 4)
    assert made.slot("a") is None


def test_a_forgotten_names_bit_is_the_next_to_be_given_the_lowest_first() -> None:
    made = slots(4, "a", "b", "c")
    made.forget("b")
    made.forget("a")
    made.forget("a")
    assert made.known([0, 1]) == {}
    made.remember(signature("d"), 1)
    made.remember(signature("e"), 1)
    made.remember(signature("f"), 1)
    assert [made.slot(name) for name in "cdef"] == [2, 0, 1, 3]


def test_the_bits_of_what_joined_ranks_submit_too_are_told() -> None:
    made = slots(4, "a", "b")
    made.remember(signature("c", by_all=True), 1)
    made.remember(signature("a", by_all=True), 1)
    assert sorted(made.by_all()) == [0, 2]
    made.forget("c")
    assert made.by_all() == [0]


def test_two_ranks_that_make_the_same_calls_agree_whatever_they_are() -> None:
    one, other, rng = NameSlots(5), NameSlots(5), random.Random(0)
    for _ in range(500):
        name = rng.choice("abcdefghij")
        call = rng.choice(["remember", "touch", "forget"])
        for each in (one, other):
            if call == "remember":
                each.remember(signature(name, once=name == "j"), 1)
            else:
                getattr(each, call)(name)
        bits = [one.slot(name) for name in "abcdefghij"]
        assert bits == [other.slot(name) for name in "abcdefghij"]
        taken = [bit for bit in bits if bit is not None]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(range(5))
        assert one.known(range(5)).keys() == {
            name for name, bit in zip("abcdefghij", bits, strict=True) if bit is not None
        }
