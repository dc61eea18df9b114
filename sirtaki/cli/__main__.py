"""Entry point of `sirtaki` and `python -m sirtaki.cli`: import the module of the requested command, such as `sirtaki
report`, and run it.

The module of a command has functions `configure(parser)` and `main(options) -> exit code`. It is imported only when the
command is called, so that a command loads only its own dependencies.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import sirtaki
from sirtaki.errors import SirtakiError

# (module, line for `--help`) of each command, by name of the command
COMMANDS = {
    "aggregator": ("sirtaki.cli.aggregator", "a process that sums hot rows of sparse gradients for jobs, over UDP"),
    "completion": ("sirtaki.cli.completion", "a script with which bash or zsh complete these commands and sirtakirun"),
    "doctor": ("sirtaki.cli.doctor", "what is here, what of it can be used, and what is wrong"),
    "optimize": ("sirtaki.cli.optimize", "how a recorded job's gradients should travel: a plan for the next job"),
    "plan": ("sirtaki.cli.plan", "how a job whose log is here would scale on other clusters"),
    "profile": ("sirtaki.cli.profile", "run a job that is recorded on all ranks: operators, gradients, units"),
    "registry": ("sirtaki.cli.registry", "what is remembered: list, show, compare, export, import, remove"),
    "replay": ("sirtaki.cli.replay", "what a recorded job's step is made of, and how long it would take otherwise"),
    "report": (
        "sirtaki.cli.report",
        "a recording, or what a job's tuning tried and gained: in short, and as an HTML page",
    ),
    "top": ("sirtaki.cli.top", "the jobs that run on this machine now, live"),
    "trace": ("sirtaki.cli.trace", "a recording for other tools: Perfetto, and simulators that read Chakra traces"),
    "translate": (
        "sirtaki.cli.translate",
        "turn a training script of one process, or for DDP or Horovod, into one for Sirtaki",
    ),
}


def build_parser(with_options: Callable[[str], bool] = lambda name: True) -> argparse.ArgumentParser:
    """Build the command-line parser of all commands.

    Args:
        with_options: says for the name of a command whether to add its options. Adding them imports the module of the
            command.
    """
    parser = argparse.ArgumentParser(prog="sirtaki", description="Look after Sirtaki; jobs start with `sirtakirun`.")
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
