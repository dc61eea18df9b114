"""Checks an entry that comes from elsewhere, field by field: types, ranges, sizes, and nothing unknown.

An import is data from strangers: this is the border, and all behind it may trust an entry. Nothing here is executed or
looked up by name; nesting is as deep as the schema and no deeper.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sirtaki.errors import RegistryError
from sirtaki.link_model import LinkModel

from .checked import (
    HIGHEST,
    checked_choice,
    checked_fields,
    checked_flag,
    checked_list,
    checked_number,
    checked_pairs,
    checked_text,
    checked_whole,
)
from .entry import Entry, EntryKey, Provenance, implausible
from .graph import Graph
from .topology import MAX_RANKS, Topology

_T = TypeVar("_T")

MAX_TRIALS = 10_000
MAX_CUTS = 100_000
_LOWEST_RATE = 1e-9

_ALGORITHMS = ("flat", "hierarchical")
_TRANSPORTS = ("shared_memory", "gloo", "mpi", "nccl", "staged")
_STATUSES = ("complete", "pruned", "failed")
_BODY_FIELDS = (
    *("key", "layout", "knobs", "best_span_s", "default_span_s", "noise_s", "n_trials"),
    *("arm", "complete", "trials", "link", "provenance"),
)


def entry_from_json(data: object) -> Entry:
    """The entry that `Entry.to_json` described.

    Raises:
        RegistryError: a field is missing, unknown or has an invalid value, or no job can have found this;
            the message names it.
    """
    fields = checked_fields("entry", data, (*_BODY_FIELDS, "model", "topology"))
    entry = body_from_json(
        {name: fields[name] for name in _BODY_FIELDS},
        model=_named("model", Graph.from_json, fields["model"]),
        topology=_named("topology", Topology.from_json, fields["topology"]),
    )
    if not entry.model.is_acyclic:
        raise RegistryError("model: a model's graph is directed and has no cycle")
    if entry.model.fingerprint() != entry.key.model:
        raise RegistryError("key.model: is not the fingerprint of the model's graph")
    if entry.topology.fingerprint() != entry.key.topology:
        raise RegistryError("key.topology: is not the fingerprint of the topology")
    if entry.topology.world_size != entry.key.world_size:
        raise RegistryError(f"key.world_size: {entry.key.world_size}, but the topology has {entry.topology.world_size}")
    if why := implausible(entry):
        raise RegistryError(why)
    return entry


def body_from_json(data: object, *, model: Graph, topology: Topology) -> Entry:
    """The entry that `Entry.body_to_json` described, of this model and topology.

    Raises:
        RegistryError: as in `entry_from_json`.
    """
    fields = checked_fields("entry", data, _BODY_FIELDS)
    return Entry(
        key=_key(fields["key"]),
        model=model,
        topology=topology,
        layout=checked_text("layout", fields["layout"]),
        knobs=checked_knobs("knobs", fields["knobs"]),
        best_span_s=checked_number("best_span_s", fields["best_span_s"], low=1e-9),
        default_span_s=checked_number("default_span_s", fields["default_span_s"], low=1e-9),
        noise_s=checked_number("noise_s", fields["noise_s"]),
        n_trials=checked_whole("n_trials", fields["n_trials"], high=10**9),
        arm=checked_text("arm", fields["arm"]),
        complete=checked_flag("complete", fields["complete"]),
        trials=tuple(
            _trial(f"trials[{index}]", item)
            for index, item in enumerate(checked_list("trials", fields["trials"], MAX_TRIALS))
        ),
        link=None if fields["link"] is None else _link(fields["link"]),
        provenance=_provenance(fields["provenance"]),
    )


def checked_knobs(path: str, data: object) -> dict[str, Any]:
    """A copy of knobs as `Knobs.to_json` gives them, `path` being their name in messages.

    Raises:
        RegistryError: as in `entry_from_json`.
    """
    fields = checked_fields(path, data, ("unit_bytes", "streams", "threads", "algorithm", "transport", "cuts"))
    streams = checked_whole(f"{path}.streams", fields["streams"], low=1, high=1024)
    return {
        "unit_bytes": checked_whole(f"{path}.unit_bytes", fields["unit_bytes"], low=1, high=2**40),
        "streams": streams,
        "threads": _threads(f"{path}.threads", fields["threads"]),
        "algorithm": checked_choice(f"{path}.algorithm", fields["algorithm"], _ALGORITHMS),
        "transport": checked_choice(f"{path}.transport", fields["transport"], _TRANSPORTS),
        "cuts": None if fields["cuts"] is None else _cuts(f"{path}.cuts", fields["cuts"], streams),
    }


def _cuts(path: str, data: object, streams: int) -> list[list[int | None]]:
    cuts: list[list[int | None]] = []
    end = 0
    for index, item in enumerate(checked_list(path, data, MAX_CUTS)):
        here = f"{path}[{index}]"
        if len(checked_list(here, item, 3)) != 3:
            raise RegistryError(f"{here}: must be a list of stop, stream and threads")
        stop = checked_whole(f"{here}.stop", item[0], low=end + 1, high=2**48)
        stream = checked_whole(f"{here}.stream", item[1], high=streams - 1)
        cuts.append([stop, stream, _threads(f"{here}.threads", item[2])])
        end = stop
    return cuts


def _trial(path: str, data: object) -> dict[str, Any]:
    fields = checked_fields(path, data, ("arm", "knobs", "iterations", "span_s", "noise_s", "status", "was_best"))
    span_s = fields["span_s"]
    return {
        "arm": checked_text(f"{path}.arm", fields["arm"]),
        "knobs": checked_knobs(f"{path}.knobs", fields["knobs"]),
        "iterations": checked_whole(f"{path}.iterations", fields["iterations"], high=10**9),
        "span_s": None if span_s is None else checked_number(f"{path}.span_s", span_s),
        "noise_s": checked_number(f"{path}.noise_s", fields["noise_s"]),
        "status": checked_choice(f"{path}.status", fields["status"], _STATUSES),
        "was_best": checked_flag(f"{path}.was_best", fields["was_best"]),
    }


def _key(data: object) -> EntryKey:
    fields = checked_fields(
        "key",
        data,
        ("model", "topology", "world_size", "dtype", "device", "versions"),
        optional=("gradients", "fixed", "condition"),  # older releases know none
    )
    return EntryKey(
        model=checked_text("key.model", fields["model"]),
        topology=checked_text("key.topology", fields["topology"]),
        world_size=checked_whole("key.world_size", fields["world_size"], low=1, high=MAX_RANKS),
        dtype=checked_text("key.dtype", fields["dtype"]),
        device=checked_text("key.device", fields["device"]),
        versions=checked_pairs("key.versions", fields["versions"]),
        gradients=checked_text("key.gradients", fields.get("gradients", "")),
        fixed=checked_pairs("key.fixed", fields.get("fixed", {})),
        condition=checked_text("key.condition", fields.get("condition", "")),
    )


def _link(data: object) -> LinkModel:
    if isinstance(data, Mapping) and "latency_s" in data:  # as older releases write it
        return _old_link(data)
    fields = checked_fields("link", data, ("alpha_s", "throughput", "host_s", "residual"))
    return LinkModel(
        alpha_s=checked_number("link.alpha_s", fields["alpha_s"]),
        throughput=_rates("link.throughput", fields["throughput"]),
        host_s=checked_number("link.host_s", fields["host_s"]),
        residual=checked_number("link.residual", fields["residual"]),
    )


def _old_link(data: object) -> LinkModel:
    fields = checked_fields("link", data, ("latency_s", "bandwidth_bytes_per_s", "concurrency"))
    alone = checked_number("link.bandwidth_bytes_per_s", fields["bandwidth_bytes_per_s"], low=_LOWEST_RATE)
    gains = _rates("link.concurrency", fields["concurrency"] or [1.0])
    return LinkModel(
        alpha_s=checked_number("link.latency_s", fields["latency_s"]),
        throughput=tuple(min(max(alone * gain, _LOWEST_RATE), HIGHEST) for gain in gains),
    )


def _rates(path: str, data: object) -> tuple[float, ...]:
    rates = checked_list(path, data, 1024)
    if not rates:
        raise RegistryError(f"{path}: must not be empty")
    return tuple(checked_number(f"{path}[{index}]", rate, low=_LOWEST_RATE) for index, rate in enumerate(rates))


def _provenance(data: object) -> Provenance:
    fields = checked_fields("provenance", data, ("created_s", "model_name", "host_kinds", "versions"))
    return Provenance(
        created_s=checked_number("provenance.created_s", fields["created_s"], high=1e11),
        model_name=checked_text("provenance.model_name", fields["model_name"]),
        host_kinds=tuple(
            checked_text(f"provenance.host_kinds[{index}]", item)
            for index, item in enumerate(checked_list("provenance.host_kinds", fields["host_kinds"], MAX_RANKS))
        ),
        versions=checked_pairs("provenance.versions", fields["versions"]),
    )


def _threads(path: str, value: object) -> int | None:
    return None if value is None else checked_whole(path, value, low=1, high=2**20)


def _named(path: str, parse: Callable[[object], _T], data: object) -> _T:
    try:
        return parse(data)
    except RegistryError as err:
        raise RegistryError(f"{path}: {err}") from err
