"""Entry point of `sirtaki` and `python -m sirtaki.cli`: import the module of the requested command, such as `sirtaki
report`, and run it.

The module of a command has functions `configure(parser)` and `main(options) -> exit code`. It is imported only when the
command is called, so that each command loads only its own dependencies.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import sirtaki
from sirtaki.errors import SirtakiError

# Commands by group: {title of the group: {name of the command: (its module, its line for `--help`)}}.
GROUPS = {
    "jobs": {
        "doctor": (
            "sirtaki.cli.doctor",
            "check this machine: ranks, transports, GPUs, MPI, and problems with their remedies",
        ),
        "top": ("sirtaki.cli.top", "show the jobs that are running on this machine, live"),
        "profile": ("sirtaki.cli.profile", "run a job, and record some of its training steps on all ranks"),
    },
    "recordings and trial logs": {
        "report": ("sirtaki.cli.report", "summarise a recording or a trial log, and write an HTML page"),
        "replay": ("sirtaki.cli.replay", "show the parts of a recorded step, and predict its time in other cases"),
        "optimize": ("sirtaki.cli.optimize", "search for a faster communication plan for a recorded job"),
        "plan": ("sirtaki.cli.plan", "predict from a trial log how a job scales on other clusters"),
        "trace": ("sirtaki.cli.trace", "convert a recording for Perfetto, or for simulators that read Chakra traces"),
    },
    "scripts": {
        "translate": ("sirtaki.cli.translate", "convert a script for one process, DDP or Horovod to Sirtaki"),
        "completion": ("sirtaki.cli.completion", "print a script by which bash or zsh complete commands and options"),
    },
    "stored results and services": {
        "registry": ("sirtaki.cli.registry", "list, show, export, import and remove tuning results of earlier jobs"),
        "aggregator": ("sirtaki.cli.aggregator", "run a process that sums frequent rows of sparse gradients over UDP"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
# {first command of a group: title of the group}
_TITLES = {next(iter(group)): title for title, group in GROUPS.items()}


class _GroupedCommands(argparse.HelpFormatter):
    """Formatter of `--help` that writes the title of a group above its first command."""

    def _format_action(self, action: argparse.Action) -> str:
        text, title = super()._format_action(action), _TITLES.get(action.dest)
        return text if title is None else f"\n  {title}:\n{text}"


def build_parser(with_options: Callable[[str], bool] = lambda name: True) -> argparse.ArgumentParser:
    """Build the command-line parser of all commands.

    Args:
        with_options: function that returns whether to add the options of the command with the given name. Adding the
            options imports the module of the command.
    """
    parser = argparse.ArgumentParser(
        prog="sirtaki",
        description="Inspect jobs, recordings and results of Sirtaki. Jobs are started with `sirtakirun`.",
        formatter_class=_GroupedCommands,
    )
    parser.add_argument("--version", action="version", version=f"sirtaki {sirtaki.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help_line) in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line)
        if with_options(name):
            importlib.import_module(module).configure(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, such as `sirtaki report`.

    Returns:
        The exit code of the command; 1 if the command raised one of Sirtaki's errors; 2 if the command line is invalid.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    parser = build_parser(lambda name: name == wanted)
    if wanted is not None and wanted not in COMMANDS and (meant := difflib.get_close_matches(wanted, COMMANDS, 1)):
        parser.error(f"sirtaki has no command {wanted!r}; did you mean {meant[0]!r}?")
    options = parser.parse_args(arguments)
    try:
        return int(importlib.import_module(COMMANDS[options.command][0]).main(options))
    except BrokenPipeError:  # Exit quietly if the reader of the output, such as `head`, has exited.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SirtakiError as err:
        print(f"sirtaki {options.command}: {err}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
