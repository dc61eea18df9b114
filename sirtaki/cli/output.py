"""Functions that several commands use: print tables and JSON, read and write files, parse the values of options."""

from __future__ import annotations

import csv
import json
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sirtaki.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from sirtaki.analysis.recording import Recording

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_formats(parser: ArgumentParser) -> None:
    """Add the options `--json` and `--csv` to the parser of a command. The command passes them to `printed`."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON")
    formats.add_argument("--csv", action="store_true", help="print the table as CSV")


def printed(options: Namespace, data: Any, rows: Sequence[Mapping[str, Any]] | None = None) -> bool:
    """Print the output of a command as JSON or CSV if `--json` or `--csv` is set.

    Args:
        options: parsed options of a command that has called `add_formats`.
        data: data to print with `--json`.
        rows: rows to print with `--csv`; None to print `data` as rows. Values that are lists or dicts are converted to
            JSON.

    Returns:
        True if JSON or CSV was printed, so that the caller prints nothing else.
    """
    if options.json:
        print(json.dumps(data, indent=1))
    elif options.csv:
        rows = data if rows is None else rows
        writer = csv.writer(sys.stdout, lineterminator="\n")
        titles = list(dict.fromkeys(name for row in rows for name in row))
        writer.writerow(titles)
        for row in rows:
            values = (row.get(title) for title in titles)
            writer.writerow([json.dumps(one) if isinstance(one, (dict, list, tuple)) else one for one in values])
    return bool(options.json or options.csv)


def rich_table(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table for a terminal. The text of cells is printed as it is, not parsed as markup of the package rich,
    because names may contain brackets.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=any(titles), pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_table(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table.

    It may be 200 characters wide if the output is not a terminal, because the default of 80 would cut it.
    """
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(rich_table(titles, rows))


# ── recordings and other files ───────────────────────────────────────────────────────────────────────────────────────


def add_recording(parser: ArgumentParser) -> None:
    """Add the argument for the folder of a recording to the parser of a command. `read_recording` reads the folder."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that `sirtaki profile` has written")


def read_recording(options: Namespace) -> Recording:
    """Read the recording in the folder that the user has given. Print problems of the recording, such as missing ranks,
    to standard error.

    Raises:
        RecordingError: the folder contains no readable recording.
    """
    from sirtaki.analysis.recording import read_folder

    recording = read_folder(options.folder)
    for problem in recording.problems:
        print(f"sirtaki {options.command}: {problem}", file=sys.stderr)
    return recording


def write_file(path: Path, text: str, what: str) -> None:
    """Write text to a file.

    Args:
        path: path of the file.
        text: content of the file.
        what: name of the content for the error message, such as "the plan".

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{what} cannot be written to the output file: {err}") from err


# ── types of options; each raises ArgumentTypeError for invalid values ────────────────────────────────────────────────


def positive(text: str) -> float:
    """Parse the value of an option that is a finite number greater than 0."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise ArgumentTypeError(f"the value of this option must be a finite number greater than 0, found {text!r}")


def whole(least: int) -> Callable[[str], int]:
    """Return a function that parses the value of an option as an integer, and rejects numbers below `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"the value of this option must be an integer of at least {least}, found {text!r}")
        return int(text)

    return number


def memory_bytes(text: str) -> int:
    """Parse the value of an option that is an amount of memory, such as `6G`, `512M`, `1.5GiB`, or a number of bytes.
    K, M, G and T are powers of 1024.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    n_bytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if not n_bytes:
        raise ArgumentTypeError(
            f"the value of this option must be an amount of memory, such as 6G or 512M, found {text!r}"
        )
    return n_bytes
