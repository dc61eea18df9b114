"""`sirtaki trace`: convert a recording into one trace of all ranks for Perfetto, or into a Chakra execution trace per
rank for simulators.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sirtaki.analysis.alignment import PathSpan, align, write_trace
from sirtaki.analysis.global_graph import path_spans, play
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.recording import Recording, of_ranks
from sirtaki.errors import ConfigError, PlanError, RecordingError, ReplayError
from sirtaki.measures import counted

from .output import add_recording, read_recording


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sirtaki trace` to the parser."""
    add_recording(parser)
    parser.add_argument(
        "--chakra",
        type=Path,
        metavar="PREFIX",
        help="write Chakra execution traces, PREFIX.0.et and so on, instead of DIR/trace.json for Perfetto",
    )


def _critical_path(recording: Recording) -> tuple[PathSpan, ...]:
    """Return the critical path of the recorded job, found by a replay (simulation); empty if the job cannot be
    replayed.
    """
    try:
        found = histories(recording)
        return tuple(path_spans(found, play(job_model(found))))
    except (PlanError, ReplayError) as err:
        print(
            f"The trace does not show the critical path, because the job could not be simulated: {err}", file=sys.stderr
        )
        return ()


def main(options: argparse.Namespace) -> int:
    """Write the trace files, and print their paths.

    Raises:
        ConfigError: Chakra traces were requested, but the package protobuf is not installed.
        RecordingError, ReplayError: the recording is empty, or a file cannot be written.
    """
    recording = read_recording(options)
    try:
        if options.chakra is None:
            path = write_trace(options.folder, recording, align(recording), _critical_path(recording))
            print(f"A trace of all ranks on one clock was written to {path}; open this file at https://ui.perfetto.dev")
            return 0
        try:
            from sirtaki.analysis.chakra import (
                write_traces,
            )  # Imported only here, because only Chakra traces need the package protobuf.
        except ImportError as err:
            raise ConfigError(
                "--chakra needs the package protobuf 5.28 or newer, which is not installed; run: pip install "
                "'sirtaki[chakra]'"
            ) from err
        written = write_traces(options.chakra, histories(recording))
    except OSError as err:
        raise RecordingError(
            f"the trace of the recorded job cannot be written to {options.chakra or options.folder}: {err}; check the "
            "permissions and the free disk space there"
        ) from err
    files = written.files
    print(
        f"the Chakra traces of {counted(written.iterations, 'iteration')} of {counted(len(files), 'rank')}, with "
        f"{written.nodes} operations (graph nodes) in total, were written to {files[0]}"
        f"{f' … {files[-1].name}' if len(files) > 1 else ''}"
    )
    if written.groups is not None:
        print(
            f"the groups of ranks, for ASTRA-sim's option --comm-group-configuration, were written to {written.groups}"
        )
    if list(recording.ranks) != list(range(len(files))):
        print(
            "the numbers in the names of the trace files are not ranks; sorted by number, the files are those of "
            f"{of_ranks(tuple(recording.ranks))}"
        )
    return 0
