"""`sirtaki completion`: print a script with which bash or zsh completes the commands, options and file arguments of
`sirtaki` and `sirtakirun`.
"""

import argparse
from collections.abc import Iterator

from sirtaki.errors import ConfigError
from sirtaki.run.options import build_parser as build_launcher_parser

FILES = {"COMMAND", "DIR", "DIR_OR_LOG", "FILE", "FOLDER", "LOG", "SCRIPT"}
"""Placeholders of arguments in `--help` (metavars) for which the shell completes file names."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sirtaki completion` to the parser."""
    parser.add_argument("shell", choices=["bash", "zsh"], metavar="SHELL", help="bash or zsh")


def main(options: argparse.Namespace) -> int:
    """Print the completion script for `sirtaki` and `sirtakirun`.

    Raises:
        ConfigError: the package shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as err:
        raise ConfigError(
            "shell completion needs the package shtab, which is not installed; run: pip install 'sirtaki[completion]'"
        ) from err
    from .__main__ import build_parser

    for parser in (build_parser(), build_launcher_parser()):
        for action in _actions(parser):
            if (action.metavar or action.dest.upper()) in FILES and action.choices is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if action.nargs == argparse.REMAINDER:
                # Give the argument a help text: shtab omits arguments without one.
                action.help = "what the ranks run"
        # Make the zsh script work when it is loaded from a file. A shell that generates the script at each start takes
        # a second longer.
        print(shtab.complete(parser, options.shell).replace("[-1] == eval ]]", "[-1] == (eval|file) ]]"))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
