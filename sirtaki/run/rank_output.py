"""Standard output and error of a rank: whole lines, unfinished ones marked, and no character that ends training."""

import io
import os
import sys
from typing import TYPE_CHECKING

from .rank_channel import UNFINISHED

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _MarkedFile(io.FileIO):
    """A file descriptor; what is written without an end of line (a progress bar, a prompt) is marked as unfinished."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes all of `data`, with its mark at once, so that nobody's text comes between."""
        text = bytes(data)
        rest = memoryview(text if text.endswith(b"\n") or not text else text + UNFINISHED)
        while rest:
            rest = rest[os.write(self.fileno(), rest) :]
        return len(text)


def mark_unfinished_lines() -> None:
    """Replaces `sys.stdout` and `sys.stderr`, whose lines are written whole: else those of several ranks are mixed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        raw = _MarkedFile(stream.fileno(), "wb", closefd=False)
        raw.name = stream.name
        utf8 = stream.encoding.replace("-", "").lower() == "utf8"
        marked = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding,
            # What the terminal's encoding lacks is written as an escape, not raised in the middle of training.
            errors=stream.errors if utf8 and stream.errors != "strict" else "backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, marked)
        setattr(sys, f"__{name}__", marked)
