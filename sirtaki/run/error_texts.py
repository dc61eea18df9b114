"""What ranks write about the errors that end them: each in one piece, and no more than is needed to see the cause."""

from collections.abc import Callable


class ErrorTexts:
    """Holds back what a rank writes from `begin` to `end`."""

    def __init__(self, label: Callable[[int], str] = str) -> None:
        """`label` says what the user calls a rank."""
        self._label = label
        self._held: dict[int, bytes] = {}
        self._brief: dict[int, str] = {}
        self._shown: dict[bytes, int] = {}  # by which rank first

    @property
    def ranks(self) -> list[int]:
        """Those that have begun and not ended."""
        return list(self._held)

    def begin(self, rank: int, brief: str = "") -> None:
        """What this rank writes from now on is about its error.

        Args:
            rank: of the job.
            brief: says enough where another rank's error has been shown; empty if only the whole does.
        """
        self._held.setdefault(rank, b"")
        self._brief[rank] = brief

    def take(self, rank: int, text: bytes) -> bool:
        """Whether `text` is held back."""
        if rank not in self._held:
            return False
        self._held[rank] += text
        return True

    def end(self, rank: int) -> bytes:
        """What is to be shown of this rank's text; empty if nothing was held back."""
        text, brief = self._held.pop(rank, b""), self._brief.pop(rank, "")
        if brief and self._shown:
            return f"{brief}\n".encode()
        first = self._shown.setdefault(text, rank) if text else rank
        return text if first == rank else f"the same error as on rank {self._label(first)}\n".encode()
