"""Values from elsewhere are what they should be, or an error says which is not."""

from collections.abc import Callable

import pytest

from sirtaki.errors import RegistryError
from sirtaki.registry.entry import (
    MAX_TEXT_CHARS,
    checked_choice,
    checked_fields,
    checked_flag,
    checked_list,
    checked_number,
    checked_pairs,
    checked_text,
    checked_whole,
    shown,
)


def test_what_is_right_comes_back() -> None:
    assert checked_fields("x", {"a": 1, "b": 2}, ["a"], optional=["b"]) == {"a": 1, "b": 2}
    assert checked_list("x", [1], 1) == [1]
    assert checked_whole("x", 3, low=1, high=3) == 3
    assert checked_number("x", 3) == 3.0
    assert checked_flag("x", False) is False
    assert checked_text("x", "π") == "π"
    assert checked_choice("x", "a", ["a", "b"]) == "a"
    assert checked_pairs("x", {"b": "2", "a": "1"}) == (("a", "1"), ("b", "2"))


@pytest.mark.parametrize(
    "check",
    [
        lambda: checked_fields("x", [], ["a"]),
        lambda: checked_fields("x", {}, ["a"]),
        lambda: checked_fields("x", {"a": 1, "b": 2}, ["a"]),
        lambda: checked_list("x", (1,), 1),
        lambda: checked_list("x", [1, 2], 1),
        lambda: checked_whole("x", True, high=3),
        lambda: checked_whole("x", 4, high=3),
        lambda: checked_whole("x", 1.0, high=3),
        lambda: checked_number("x", float("nan")),
        lambda: checked_number("x", True),
        lambda: checked_number("x", -1),
        lambda: checked_flag("x", 1),
        lambda: checked_text("x", "a\x1b[0m"),
        lambda: checked_text("x", "a" * (MAX_TEXT_CHARS + 1)),
        lambda: checked_choice("x", "c", ["a", "b"]),
        lambda: checked_pairs("x", {"a": 1}),
        lambda: checked_pairs("x", {str(number): "" for number in range(101)}),
    ],
)
def test_what_is_wrong_is_named(check: Callable[[], object]) -> None:
    with pytest.raises(RegistryError, match=r"^x"):
        check()


def test_what_is_shown_is_short_and_harmless() -> None:
    assert shown([1] * 10**6) == "list of 1000000"
    assert len(shown("\x1b" * 1000)) == 80
