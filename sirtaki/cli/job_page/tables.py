"""Tables of text and numbers in HTML; every cell is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDEST_PX = 160


class Html(str):
    """What is HTML already."""

    __slots__ = ()


def share_bar(share: float, *classes: str) -> Html:
    """A bar as long as the share is large."""
    width_px = WIDEST_PX * min(max(share, 0.0), 1.0)
    return Html(f'<span class="{" ".join(("share", *classes))}" style="width:{width_px:.1f}px"></span>')


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = (), last: Sequence[str] = ()
) -> str:
    """A table.

    Args:
        titles: of the columns.
        rows: cells; those that are `Html` are taken as they are.
        text: places of columns that are no numbers.
        last: a row for sums.
    """

    def cell(place: int, words: str, kind: str) -> str:
        number = "" if place in text else ' class="number"'
        return f"<{kind}{number}>{words if isinstance(words, Html) else escape(words)}</{kind}>"

    def row(cells: Sequence[str], *, kind: str = "td", of: str = "") -> str:
        return f"<tr{of}>{''.join(cell(place, words, kind) for place, words in enumerate(cells))}</tr>"

    sums = row(last, of=' class="sum"') if last else ""
    return f"<table>{row(titles, kind='th')}{''.join(map(row, rows))}{sums}</table>"
