"""`sirtaki translate`: convert a training script into a script for Sirtaki. It may use one process, DDP or Horovod."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sirtaki.errors import ConfigError, TranslationError

REFUSED = 2


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki translate` to the parser."""
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a training script for PyTorch")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--write", action="store_true", help="change the script in place. Without it, the changes are only printed"
    )
    where.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write the changed script to")


def main(options: Namespace) -> int:
    """Print the changes that make the user's training script a script for Sirtaki, and write the changed script if
    requested.

    Returns:
        0, or 2 if the script cannot be converted, and so nothing was written.

    Raises:
        ConfigError: a file cannot be read or written, or the package libcst is not installed.
    """
    try:
        # Imported here, because only `sirtaki translate` needs the package libcst.
        from sirtaki.integrations.translate import translate
    except ModuleNotFoundError as err:
        raise ConfigError(
            "`sirtaki translate` needs the package libcst, which is not installed; run: pip install "
            "'sirtaki[translate]'"
        ) from err
    try:
        text = options.script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"the training script cannot be read: {err}") from err
    try:
        translation = translate(text)
    except TranslationError as err:
        for line, reason in err.obstacles:
            print(f"{options.script}:{line}: {reason}", file=sys.stderr)
        print("The script was not changed; Sirtaki's tutorials show how to convert it by hand.", file=sys.stderr)
        return REFUSED
    print(translation.diff(str(options.script)) or "nothing to change", end="\n")
    for line, note in translation.notes:
        print(f"{options.script}:{line}: {note}" if line else f"{options.script}: {note}", file=sys.stderr)
    target: Path | None = options.script if options.write else options.output
    if target is None or (options.write and translation.before == translation.after):
        return 0
    try:
        target.write_text(translation.after, encoding="utf-8")
    except OSError as err:
        raise ConfigError(
            f"the script converted to Sirtaki cannot be written to {target}: {err}; choose another file with --output"
        ) from err
    print(f"wrote {target}", file=sys.stderr)
    return 0
