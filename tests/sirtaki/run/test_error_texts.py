from sirtaki.run.output import ErrorTexts


def ended(texts: ErrorTexts, rank: int, text: bytes, brief: str = "") -> bytes:
    """What is shown of a rank's text."""
    texts.begin(rank, brief)
    assert texts.take(rank, text)
    return texts.end(rank)


def test_what_a_rank_writes_before_and_after_is_not_held_back() -> None:
    texts = ErrorTexts()
    assert not texts.take(0, b"early")
    assert ended(texts, 0, b"E: x\n") == b"E: x\n"
    assert not texts.take(0, b"late")
    assert texts.ranks == []


def test_equal_texts_are_shown_once_and_others_in_full() -> None:
    texts = ErrorTexts()
    assert ended(texts, 2, b"E: x\n") == b"E: x\n"
    assert ended(texts, 0, b"E: y\n") == b"E: y\n"
    assert ended(texts, 1, b"E: x\n") == b"the same error as on rank 2\n"


def test_the_brief_is_enough_only_where_something_has_been_shown() -> None:
    texts = ErrorTexts()
    assert ended(texts, 0, b"long\n", "short") == b"long\n"
    assert ended(texts, 1, b"longer\n", "short") == b"short\n"


def test_a_rank_that_raises_and_writes_nothing_shows_nothing() -> None:
    texts = ErrorTexts()
    texts.begin(0, "")
    assert texts.ranks == [0]
    assert texts.end(0) == b""
