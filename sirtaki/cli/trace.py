"""`sirtaki trace`: a recording for other tools: all ranks for Perfetto, and Chakra execution traces for simulators."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sirtaki.analysis.alignment import align, write_trace
from sirtaki.analysis.job_model import histories
from sirtaki.analysis.recording import Recording
from sirtaki.analysis.recording_files import of_ranks, read
from sirtaki.errors import ConfigError, RecordingError


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `sirtaki profile` has written")
    parser.add_argument(
        "--chakra",
        type=Path,
        metavar="PREFIX",
        help="write Chakra execution traces, PREFIX.0.et and so on, instead of DIR/trace.json for Perfetto",
    )


def main(options: argparse.Namespace) -> int:
    """Writes what is asked for, and says where it is.

    Raises:
        ConfigError: protobuf is missing, or a file cannot be written.
        RecordingError, ReplayError: there is nothing to write of.
    """
    recording = read(options.folder)
    for problem in recording.problems:
        print(f"sirtaki trace: {problem}", file=sys.stderr)
    try:
        if options.chakra is not None:
            return _write_chakra(recording, options.chakra)
        path = write_trace(options.folder, recording, align(recording))
    except OSError as err:
        raise RecordingError(f"the trace cannot be written: {err}") from err
    print(f"all ranks on one clock: {path} (drop it on https://ui.perfetto.dev)")
    return 0


def _write_chakra(recording: Recording, prefix: Path) -> int:
    try:
        from sirtaki.analysis.chakra import (
            traces,
            write_traces,  # needs protobuf, which other commands do without
        )
    except ImportError as err:
        raise ConfigError("protobuf is missing, or older than 5.28: pip install 'sirtaki[chakra]'") from err
    found = traces(histories(recording))
    written = write_traces(prefix, found)
    count = len({node.iteration for nodes in found.nodes.values() for node in nodes})
    print(
        f"{count} iterations of {len(found.nodes)} ranks, {sum(map(len, found.nodes.values()))} nodes: "
        f"{written[0]}{f' … {written[len(found.nodes) - 1].name}' if len(found.nodes) > 1 else ''}"
    )
    if len(found.groups) > 1:
        print(f"which ranks act together, for ASTRA-sim's --comm-group-configuration: {written[-1]}")
    if tuple(found.nodes) != tuple(range(len(found.nodes))):
        print(f"counted from 0 on, these are {of_ranks(tuple(found.nodes))}")
    return 0
