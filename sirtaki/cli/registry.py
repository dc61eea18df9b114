"""`sirtaki registry …`: print, export, import and remove tuning results that earlier jobs have stored."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.errors import RegistryError
from sirtaki.measures import LinkModel, describe_gain
from sirtaki.registry.graph import least_distance
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import RECORDS, JobRecord, RowsRecord, ShardsRecord, StoredSetting, local_time
from sirtaki.registry.warm_start import nearest

from .output import add_formats, positive, print_table, printed, whole

if TYPE_CHECKING:
    from sirtaki.registry.store import Store

DAY_S = 24 * 3600.0


def configure(parser: ArgumentParser) -> None:
    """Add the sub-commands of `sirtaki registry`, such as `list`, and their options to the parser."""
    parser.add_argument(
        "--registry",
        metavar="URL",
        help="file or database URL (default: SIRTAKI_REGISTRY, or ~/.cache/sirtaki/registry.db)",
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    listing = commands.add_parser("list", help="list the stored settings of jobs, newest first")
    show = commands.add_parser("show", help="print one entry of any kind: its setting, times and origin")
    rows = commands.add_parser("rows", help="list the fastest algorithms for sparse gradients, newest first")
    shards = commands.add_parser("shards", help="list the stored settings of FSDP2 jobs, newest first")
    similar = commands.add_parser("similar", help="list the stored jobs that are most similar to one")
    similar.add_argument("-k", type=whole(1), default=5, metavar="N", help="largest number of entries to print (5)")
    similar.add_argument(
        "--max-distance",
        type=float,
        default=0.6,
        metavar="D",
        help="largest distance to print, from 0 (identical) to 1 (nothing in common); default 0.6",
    )
    similar.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the graphs of its model and of the most similar one"
    )
    export = commands.add_parser("export", help="write entries of all kinds to a file, for `import` elsewhere")
    export.add_argument(
        "ids", nargs="*", metavar="ID", help="entries to export, by the beginning of their ids (default: all)"
    )
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: standard output)")
    importing = commands.add_parser(
        "import",
        help="add the entries of an exported file, after checks. Of two entries for one job the faster one is kept, "
        "otherwise the newer one",
    )
    importing.add_argument("file", metavar="FILE", help="file that `export` has written; - is standard input")
    prune = commands.add_parser("prune", help="remove old entries")
    prune.add_argument("--older-than", type=positive, metavar="DAYS", help="remove entries that are older than this")
    prune.add_argument(
        "--keep",
        type=whole(0),
        metavar="N",
        help="remove all but the newest N entries of each kind (list, rows, shards)",
    )
    forget = commands.add_parser("forget", help="remove one entry of any kind")
    every = "`list`, `rows` or `shards`"
    for command, lists in ((show, every), (similar, "`list`"), (forget, every)):
        command.add_argument("id", metavar="ID", help=f"the beginning of the entry's id, which {lists} prints")
    for command in (listing, rows, shards, show, similar, importing, prune, forget):
        add_formats(command)


def main(options: Namespace) -> int:
    """Run one sub-command of `sirtaki registry`, such as `list`.

    Raises:
        RegistryError: the registry or a file of the sub-command cannot be read or written, or has invalid content.
    """
    with closing(_open(options.registry, reads=options.action in _READING)) as store:
        _ACTIONS[options.action](store, options)
    return 0


def _open(url: str | None, *, reads: bool) -> Store:
    from sirtaki.registry.store import file_of

    named = url or Settings.from_environ().registry
    if named == REGISTRY_OFF:
        raise RegistryError("the registry of tuning results is switched off; pass its file or URL with --registry")
    if reads and named is not None and (file := file_of(named)) is not None and not file.exists():
        raise RegistryError(
            f"there is no registry of tuning results in {file}; pass another file or URL with --registry"
        )
    return open_store(named)


# ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _list(store: Store, options: Namespace) -> None:
    summaries = store.summaries()
    models = _unique_names({(summary.model_name, summary.model) for summary in summaries})
    clusters = _unique_names({(summary.hosts, summary.topology) for summary in summaries})
    rows = [
        {
            "id": summary.id[:8],
            "model": models[summary.model],
            "ranks": str(summary.world_size),
            "hosts": clusters[summary.topology],
            "device": f"{summary.device} {summary.dtype}",
            "communication than default": describe_gain(summary.gain, summary.default_span_s, summary.best_span_s),
            "fixed by the user": _pairs(summary.fixed),
            "communication took": summary.condition,
            "proposed by": summary.arm,
            "trials": _trials(summary),
            "made": local_time(summary.created_s),
        }
        for summary in summaries
    ]
    unused = [title for title in ("fixed by the user", "communication took") if not any(row[title] for row in rows)]
    rows = [{title: text for title, text in row.items() if title not in unused} for row in rows]
    _show_rows(options, rows, [asdict(summary) for summary in summaries], "the registry has no entries of jobs yet")


def _rows(store: Store, options: Namespace) -> None:
    def row(way: RowsRecord) -> dict[str, str]:
        return {
            "parameter": way.name,
            "rows": str(way.key.n_rows),
            "bytes per row": str(way.key.row_bytes),
            "ranks": str(way.key.ranks),
            "accessed": f"{way.skew.union / way.key.n_rows:.2%}",
            "top 1 % of these": f"{way.skew.covered(max(1, way.skew.curve[-1][0] // 100)):.0%} of accesses",
            "algorithm": _words(way),
            "frequent rows": str(way.n_hot or ""),
        }

    _show_records(options, store.all(RowsRecord), row, "the registry has no algorithms for sparse gradients yet")


def _shards(store: Store, options: Namespace) -> None:
    def row(way: ShardsRecord) -> dict[str, str]:
        return {
            "model": way.key.model[:8],
            "modules": str(way.modules),
            "ranks": str(way.key.ranks),
            "transport": way.key.transport,
            "memory allowed": f"{way.memory_bytes / 1e6:.0f} MB",
            "setting": _setting(way),
            "faster than untuned": f"{way.gain:.0%}" if way.gain else "no setting",
        }

    _show_records(options, store.all(ShardsRecord), row, "the registry has no settings of FSDP2 jobs yet")


_R = TypeVar("_R", bound=StoredSetting)


def _show_records(options: Namespace, found: Iterable[_R], row: Callable[[_R], dict[str, str]], nothing: str) -> None:
    records = list(found)
    rows = [{"id": record.id[:8], **row(record), "made": local_time(record.created_s)} for record in records]
    _show_rows(options, rows, [{"id": record.id, **record.to_json()} for record in records], nothing)


def _show(store: Store, options: Namespace) -> None:
    found = store.find(StoredSetting, options.id)
    data = found.to_json()
    if not printed(options, data, [data]):
        key: Any = found.key  # Any, because each type of record has another type of key. All keys have `versions`.
        facts = {"id": found.id, **_FACTS[type(found)](found), "key versions": _versions(key.versions)}
        if isinstance(found, JobRecord):
            facts["versions"] = _versions(found.provenance.versions)
        print_table(["", ""], facts.items())


def _rows_facts(way: RowsRecord) -> Mapping[str, str]:
    key = way.key
    return {
        "parameter": f"{way.name}: {key.n_rows} rows of {key.row_bytes} bytes, {key.dtype}, on {key.ranks} ranks",
        "cluster": key.topology,
        "accessed": f"{way.skew.union:.0f} rows in an iteration; {way.skew.touched:.0f} as the sum over ranks",
        "coverage": ", ".join(f"{rows}: {part:.0%}" for rows, part in way.skew.curve),
        "fixed by the user": _pairs(key.fixed.items()) or "nothing",
        "aggregator": "there" if key.aggregator else "none",
        "algorithm": f"{_words(way)}, {way.n_hot} frequent rows" if way.n_hot else _words(way),
        "took": f"{1e3 * way.span_s:.3f} ms"
        if way.span_s
        else "not timed, because no other algorithm was worth a trial",
        "made": local_time(way.created_s),
    }


def _shards_facts(way: ShardsRecord) -> Mapping[str, str]:
    key = way.key
    return {
        "model": f"{way.modules} sharded modules on {key.ranks} ranks, {key.model}",
        "cluster": key.topology,
        "transport": key.transport,
        "memory allowed": f"{way.memory_bytes} bytes above untuned training",
        "fixed by the user": _pairs(key.fixed.items()) or "nothing",
        "setting": _setting(way),
        "gain": f"{way.gain:.0%} faster than untuned" if way.gain else "nothing was faster than untuned",
        "made": local_time(way.created_s),
    }


def _job_facts(entry: JobRecord) -> Mapping[str, str]:
    key, knobs = entry.key, entry.knobs.to_json()
    if knobs["cuts"] is not None:
        knobs["cuts"] = f"{len(knobs['cuts'])} planned units"
    links = {"inside a host": entry.topology.local_link, "between hosts": entry.topology.network_link}
    known = [f"{name} {link}" for name, link in links.items() if link.is_known]
    return {
        "job": entry.describe(),
        "model": f"{len(entry.model)} nodes, {len(entry.model.edges)} edges, {key.model}",
        "cluster": "; ".join([entry.topology.describe(), *known, key.topology]),
        "hosts": ", ".join(filter(None, entry.provenance.host_kinds)) or "of unknown kind",
        "elements": f"{key.dtype} on {key.device}",
        "gradients": key.gradients or "unknown",
        "fixed by the user": _pairs(key.fixed.items()) or "nothing",
        "communication took": f"{key.condition or '1×'} its usual time",
        "knobs": _pairs((name, value) for name, value in knobs.items() if value is not None),
        "communication": f"{1e3 * entry.best_span_s:.3f} ms a step ± {1e3 * entry.noise_s:.3f}",
        "with the default": f"{1e3 * entry.default_span_s:.3f} ms communication a step",
        "gain": f"communication {entry.describe_gain()}",
        "proposed by": entry.arm or "unknown",
        "trials": _trials(entry),
        "link": "not measured" if entry.link is None else _link(entry.link),
        "made": local_time(entry.provenance.created_s),
    }


_FACTS: Mapping[type, Callable[[Any], Mapping[str, str]]] = {  # Any, because records have different types.
    JobRecord: _job_facts,
    RowsRecord: _rows_facts,
    ShardsRecord: _shards_facts,
}


def _similar(store: Store, options: Namespace) -> None:
    entry = store.find(JobRecord, options.id)
    found = nearest(
        store,
        entry.model,
        entry.topology,
        dtype=entry.key.dtype,
        device=entry.key.device,
        k=options.k + 1,  # Request one more, because the entry itself is found, too.
        max_distance=options.max_distance,
        budget_s=10.0,
    )
    matches = [(match, store.find(JobRecord, match.id)) for match in found if match.id != entry.id][: options.k]
    least = {match.id: least_distance(entry.model, other.model) for match, other in matches}
    rows = [
        {
            "id": match.id[:8],
            "job": other.describe(),
            "distance": f"{match.distance:.3f}",
            "of models": f"{least[match.id]:.3f}–{match.model_distance:.3f}",
            "of clusters": f"{match.topology_distance:.3f}",
            "communication than default": other.describe_gain(),
        }
        for match, other in matches
    ]
    data = [{**asdict(match), "least_model_distance": least[match.id]} for match, _ in matches]
    _show_rows(options, rows, data, "no other entry is that near; try a larger --max-distance")
    if options.plot is not None:
        if not matches:
            raise RegistryError(
                "--plot has nothing to draw, because the registry of tuning results contains no job with a similar "
                "model; a larger --max-distance also accepts less similar models"
            )
        from sirtaki.registry.graph import draw_match

        match, other = matches[0]
        draw_match(
            entry.model,
            other.model,
            options.plot,
            titles=(f"{entry.id[:8]}: {entry.describe()}", f"{other.id[:8]}: {other.describe()}"),
            caption=f"model distance {match.model_distance:.3f}, with the clusters {match.distance:.3f}",
        )


def _show_rows(options: Namespace, rows: Sequence[Mapping[str, str]], data: Any, nothing: str) -> None:
    """Print a table with a row for each record of the registry. If there are no records, print the text `nothing`. With
    `--json` or `--csv`, print `data` instead.
    """
    if printed(options, data):
        return
    if rows:
        print_table(list(rows[0]), [row.values() for row in rows])
    else:
        print(nothing, file=sys.stderr)


# ── change ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _export(store: Store, options: Namespace) -> None:
    from sirtaki.registry.documents import write_document

    records: Iterable[StoredSetting] = (record for kind in RECORDS for record in store.all(kind))
    if options.ids:
        records = [store.find(StoredSetting, id_prefix) for id_prefix in options.ids]
    try:
        opened = nullcontext(sys.stdout) if options.output is None else options.output.open("w")
    except OSError as err:
        raise RegistryError(f"the export file {options.output} cannot be written: {err.strerror}") from err
    with opened as file:
        count = write_document(records, file)
    print(f"exported: {count}", file=sys.stderr)


def _import(store: Store, options: Namespace) -> None:
    from sirtaki.registry.documents import read_document

    source = "standard input" if options.file == "-" else options.file
    with ExitStack() as stack:
        try:
            file = sys.stdin if options.file == "-" else stack.enter_context(open(options.file, encoding="utf-8"))
        except OSError as err:
            raise RegistryError(
                f"nothing was imported into the registry of tuning results, because {source} cannot be read: "
                f"{err.strerror}"
            ) from err
        try:
            records = read_document(file)
        except RegistryError as err:
            raise RegistryError(
                f"nothing was imported into the registry of tuning results, because {source} is not a file of "
                f"`sirtaki registry export`, or is damaged: {err}"
            ) from err
    kept = store.put_all(records)
    _report(options, {"imported": kept, "kept as they were": len(records) - kept})


def _prune(store: Store, options: Namespace) -> None:
    if options.older_than is None and options.keep is None:
        raise RegistryError("`sirtaki registry prune` needs --older-than DAYS, --keep N or both")
    age_s = None if options.older_than is None else options.older_than * DAY_S
    _report(options, {"removed": store.prune(older_than_s=age_s, keep=options.keep)})


def _forget(store: Store, options: Namespace) -> None:
    _report(options, {"forgotten": store.forget(options.id)})


def _report(options: Namespace, facts: dict[str, Any]) -> None:
    if not printed(options, facts, [facts]):
        print(", ".join(f"{name}: {value}" for name, value in facts.items()))


_READING = ("list", "rows", "shards", "show", "similar", "export")
_ACTIONS = {
    "list": _list,
    "rows": _rows,
    "shards": _shards,
    "show": _show,
    "similar": _similar,
    "export": _export,
    "import": _import,
    "prune": _prune,
    "forget": _forget,
}


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _unique_names(named: Set[tuple[str, str]]) -> dict[str, str]:
    """Return a name for each fingerprint (digest) of a model or a cluster, from pairs (name, fingerprint).

    If several models or clusters have the same name, the beginning of the fingerprint is added.
    """
    count = Counter(name for name, _ in named)
    return {
        fingerprint: (name if count[name] == 1 else f"{name} {fingerprint[:4]}") if name else fingerprint[:8]
        for name, fingerprint in named
    }


def _words(way: RowsRecord) -> str:
    """Describe in words how the rows of a sparse gradient are reduced according to a record of the registry."""
    if way.path is SparsePath.HOT_COLD:
        return f"{way.path.value}, {way.cold.value}{', aggregator' if way.aggregated else ''}"
    return f"{way.path.value} of {way.block_rows}" if way.path is SparsePath.BLOCKS else way.path.value


def _setting(way: ShardsRecord) -> str:
    knobs = way.setting
    numbers = {name: getattr(knobs, name) for name in ("streams", "ahead", "behind")}
    numbers |= {"kept": len(knobs.kept), "scattering": knobs.scattering}
    numbers |= {"near": len(knobs.near), "joined": len(knobs.joined)}
    used = {"gathers": knobs.gathers, "scatters": knobs.scatters}
    return _pairs((name, value) for name, value in (numbers | used).items() if value or name == "kept")


def _link(link: LinkModel) -> str:
    alone, most = link.throughput[0], max(link.throughput)
    text = f"{1e6 * link.startup_s:.1f} µs to start up, then {alone / 1e6:.1f} MB/s with one stream"
    if most == alone:
        return text
    return f"{text}, {most / alone:.2f} times that with {link.throughput.index(most) + 1}"


def _trials(one: Any) -> str:  # Any, because it is a registry entry or its summary.
    return f"{one.n_trials}{'' if one.complete else ', the next job continues'}"


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in pairs)


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown"
