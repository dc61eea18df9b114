"""Chakra traces as files: `PREFIX.RANK.et` for each rank, and `PREFIX.groups.json` where not all ranks act together.

A file is a `GlobalMetadata` and then `Node`s, each behind its length. Chakra's own feeder reads `data_deps` only, so
everything that a node waits for is there; what comes before it on its thread or stream is in `ctrl_deps`, too.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import proto

from sirtaki.errors import RecordingError
from sirtaki.profiler.folder import write_whole

from .nodes import ALL_RANKS, TraceNode, Traces
from .schema import COLLECTIVES, COMM_COLL_NODE, COMP_NODE, VERSION, Messages, messages


def write_traces(prefix: Path, found: Traces) -> list[Path]:
    """Writes them, and returns where they are: ranks are counted from 0 on, as simulators count them.

    Raises:
        OSError: a file cannot be written.
        RecordingError: a collective has no name in Chakra.
    """
    kinds, written = messages(), list[Path]()
    for place, nodes in enumerate(found.nodes.values()):
        out = io.BytesIO()
        proto.serialize_length_prefixed(kinds.GlobalMetadata(version=VERSION), out)
        for node in nodes:
            proto.serialize_length_prefixed(_message(node, kinds), out)
        written.append(prefix.with_name(f"{prefix.name}.{place}.et"))
        write_whole(written[-1], out.getvalue())
    places = {rank: place for place, rank in enumerate(found.nodes)}
    groups = {
        str(group): [places[rank] for rank in ranks] for group, ranks in found.groups.items() if group != ALL_RANKS
    }
    if groups:
        written.append(prefix.with_name(f"{prefix.name}.groups.json"))
        write_whole(written[-1], json.dumps(groups, indent=1).encode())
    return written


def _message(node: TraceNode, kinds: Messages) -> Any:
    own = node.collective
    message = kinds.Node(
        id=node.number,
        name=node.name,
        type=COMP_NODE if own is None else COMM_COLL_NODE,
        ctrl_deps=[] if node.before is None else [node.before],
        data_deps=node.after,
        start_time_micros=node.begin_us,
        duration_micros=node.end_us - node.begin_us,
    )
    attributes: dict[str, bool | int | str] = {
        "is_cpu_op": own is None,  # of collectives simulators want to hear no
        "iteration": node.iteration,
        "activity": node.activity.value,
        "phase": node.phase.value,
    }
    if own is not None:
        if own.kind not in COLLECTIVES:
            raise RecordingError(f"{node.name} is {own.kind}, for which Chakra has no name")
        attributes |= {"comm_type": COLLECTIVES[own.kind], "pg_name": str(own.group), "stream": own.stream}
        message.attr.add(name="comm_size", uint64_val=own.n_bytes)
    for name, value in attributes.items():
        message.attr.add(name=name, **_value(value))
    return message


def _value(value: bool | int | str) -> Mapping[str, Any]:
    if isinstance(value, bool):
        return {"bool_val": value}
    return {"int64_val": value} if isinstance(value, int) else {"string_val": value}
