"""A script and what becomes of it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from sirtaki.errors import TranslationError

from .edits import Edits
from .from_ddp import FromDdp
from .from_horovod import change_imports
from .single_process import distribute
from .source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What a script becomes.

    Attributes:
        before: its text.
        after: the text that trains on several ranks; the same where it does so already.
        notes: (line, text) of what a reader should know; line 0 is the whole script.
    """

    before: str
    after: str
    notes: tuple[tuple[int, str], ...]

    def diff(self, name: str) -> str:
        """The changes, as a unified diff; empty if there are none."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, fromfile=name, tofile=name))


def translate(text: str) -> Translation:
    """Turns a script of one process, for DistributedDataParallel or for Horovod into one for Sirtaki.

    Raises:
        TranslationError: it holds what is not understood.
    """
    source, edits = Source(text), Edits()
    if source.imports("sirtaki"):
        return Translation(before=text, after=text, notes=((0, "it uses Sirtaki already"),))
    if source.imports("horovod"):
        change_imports(source, edits)
    elif source.imports("torch.distributed") or "DistributedDataParallel" in text:
        FromDdp(source, edits).change()
    else:
        distribute(source, edits)
    if edits.obstacles:
        raise TranslationError.of(edits.obstacles)
    after = edits.applied(source.module)
    compile(after, "translated", "exec", dont_inherit=True)
    return Translation(before=text, after=after, notes=tuple(sorted(edits.notes)))
