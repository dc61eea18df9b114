from argparse import ArgumentTypeError

import pytest

from sirtaki.analysis.global_graph import ms
from sirtaki.cli.optimize import memory_bytes, positive


def test_numbers_above_0_are_read() -> None:
    assert [positive(text) for text in ("2", "0.5", "1e3")] == [2.0, 0.5, 1000.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [("much", "'much' is no number"), *((text, f"must be positive, not {text}") for text in ("0", "-1", "inf", "nan"))],
)
def test_what_is_none_is_said(text: str, says: str) -> None:
    with pytest.raises(ArgumentTypeError, match=says):
        positive(text)


def test_times_have_four_digits() -> None:
    assert [ms(seconds) for seconds in (0.19823, 1.5, 2e-6)] == ["198.2 ms", "1500 ms", "0.002 ms"]


def test_amounts_of_memory_are_read_in_powers_of_1024() -> None:
    texts = ("512", "2K", "1.5M", "6G", "6GiB", "6 gb", "1T")
    assert [memory_bytes(text) for text in texts] == [512, 2048, 3 << 19, 6 << 30, 6 << 30, 6 << 30, 1 << 40]


@pytest.mark.parametrize("text", ["", "much", "-1G", "0", "0.1", "6X", "1e9", "nan"])
def test_what_is_no_amount_of_memory_is_said(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{text!r} is no amount of memory: give one such as 6G or 512M"):
        memory_bytes(text)
