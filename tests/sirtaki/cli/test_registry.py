import json
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance.graphs import chain_graph
from conformance.store import make_entry, make_shard_way, make_way
from msgspec import structs

from sirtaki.cli import registry as cli
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.errors import RegistryError
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import JobRecord, RowsRecord
from sirtaki.registry.store import Store

Run = Callable[..., str]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    path = str(tmp_path / "r.db")
    monkeypatch.setenv("SIRTAKI_REGISTRY", path)
    return open_store(path)


@pytest.fixture
def run(store: Store, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `sirtaki registry …` and returns its output."""

    def run_command(*arguments: object) -> str:
        parser = ArgumentParser()
        cli.configure(parser)
        capsys.readouterr()
        assert cli.main(parser.parse_args([str(argument) for argument in arguments])) == 0
        return capsys.readouterr().out

    return run_command


@pytest.fixture
def entries(store: Store) -> list[JobRecord]:
    made = [
        make_entry(model=chain_graph([64] * length), created_s=1.7e9 + length, complete=length != 22)
        for length in (20, 21, 22)
    ]
    store.put_all(made)
    return made


def test_list_shows_every_entry_in_a_line(run: Run, entries: list[JobRecord]) -> None:
    lines = run("list").splitlines()
    assert len(lines) == 1 + len(entries)
    titles = ["id", "model", "ranks", "hosts", "device", "communication than default"]
    titles += ["fixed by the user", "proposed by", "trials", "made"]
    assert re.split(" {2,}", lines[0].strip()) == titles
    assert "2 × unknown kind" in lines[1]
    assert "transport=gloo" in lines[1]
    assert lines[1].startswith(entries[2].id[:8])
    assert "20, the next job continues" in lines[1]
    assert "2.00× faster" in lines[2]


def test_rows_shows_which_way_rows_went_where_they_were_touched_how(run: Run, store: Store) -> None:
    assert run("rows") == ""
    store.put(make_way())
    titles, line = run("rows").splitlines()
    assert re.split(" {2,}", titles.strip())[-3:] == ["algorithm", "frequent rows", "made"]
    shown = [make_way().id[:8], "table.weight", "1000", "64", "4", "15.00%", "34% of accesses", "hot_cold, owner", "30"]
    assert re.split(" {2,}", line.strip())[:-1] == shown
    assert json.loads(run("rows", "--json")) == [{"id": make_way().id, **make_way().to_json()}]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (make_way(), "hot_cold, owner"),
        (
            structs.replace(make_way(), key=structs.replace(make_way().key, aggregator=True), aggregated=True),
            "hot_cold, owner, agg",
        ),
        (structs.replace(make_way(), path=SparsePath.BLOCKS, n_hot=0, block_rows=16), "blocks of 16"),
        (structs.replace(make_way(), path=SparsePath.GATHER, n_hot=0), "gather"),
    ],
)
def test_show_tells_a_way_of_rows(run: Run, store: Store, way: RowsRecord, words: str) -> None:
    store.put(way)
    text = run("show", way.id[:10])
    assert words in text
    assert words in run("rows")
    for part in ("table.weight: 1000 rows of 64 bytes, float32, on 4 ranks", "streams=2", "30: 70%", "10.000 ms"):
        assert part in text
    assert json.loads(run("show", way.id, "--json")) == way.to_json()


def test_settings_of_sharded_training_are_shown_and_carried_elsewhere(run: Run, store: Store, tmp_path: Path) -> None:
    assert run("shards") == ""
    way, file, elsewhere = make_shard_way(), tmp_path / "all.json", f"--registry={tmp_path / 'other.db'}"
    store.put(way)
    line = run("shards").splitlines()[1]
    setting = "streams=2, ahead=3, behind=1, kept=5, scattering=1, near=2, joined=1"
    shown = [way.id[:8], "cdcdcdcd", "9", "4", "gloo", "1 MB", setting, "25%"]
    assert re.split(" {2,}", line.strip())[:-1] == shown
    assert json.loads(run("shards", "--json")) == [{"id": way.id, **way.to_json()}]
    text = run("show", way.id[:10])
    for part in ("9 sharded modules on 4 ranks", "streams=2, ahead=3", "25% faster than untuned"):
        assert part in text
    assert json.loads(run("show", way.id, "--json")) == way.to_json()
    run("export", way.id[:10], "-o", file)
    assert run(elsewhere, "import", file) == "imported: 1, kept as they were: 0\n"
    assert run(elsewhere, "import", file) == "imported: 0, kept as they were: 1\n"
    assert run("forget", way.id) == f"forgotten: {way.id}\n"
    assert run("shards") == ""


def test_models_of_one_name_are_distinguished(run: Run, store: Store) -> None:
    entries = [make_entry(model=chain_graph([100] * layers)) for layers in (3, 4)]
    assert store.put_all(entries) == 2
    lines = run("list").splitlines()[1:]
    assert [re.split(" {2,}", line)[1] for line in lines] == [f"Réseau {entry.key.model[:4]}" for entry in entries]


def test_list_for_programs_is_json_or_csv_also_of_a_new_registry(run: Run, store: Store) -> None:
    assert (run("list"), json.loads(run("list", "--json"))) == ("", [])
    store.put_all([make_entry(), make_entry(model=chain_graph([64] * 20), created_s=1.7e9 + 20)])
    ids = [summary.id for summary in store.summaries()]
    assert [line.split(",")[0] for line in run("list", "--csv").splitlines()] == ["id", *ids]
    assert [item["id"] for item in json.loads(run("list", "--json"))] == ids


def test_show_tells_knobs_and_provenance(run: Run, entries: list[JobRecord]) -> None:
    text = run("show", entries[0].id[:10])
    for part in ("streams=4", "2 planned units", "Réseau on 4 ranks on 2 hosts", "torch 2.13", "c5", "100.0 µs"):
        assert part in text
    assert json.loads(run("show", entries[0].id, "--json")) == entries[0].to_json()


def test_it_loads_no_torch(store: Store, tmp_path: Path) -> None:
    store.put_all([make_entry(), make_way(), make_shard_way()])
    code = (
        "import sys; from sirtaki.cli.__main__ import main; main(sys.argv[1:]); "
        "print('loaded:', *sorted({'torch', 'scipy'} & set(sys.modules)))"
    )
    for action in (["list"], ["shards"], ["show", make_shard_way().id], ["export", "-o", str(tmp_path / "all.json")]):
        command = [sys.executable, "-c", code, "registry", "--registry", store.name, *action]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1].strip() == "loaded:", action


def test_names_from_elsewhere_are_no_markup(run: Run, store: Store) -> None:
    entry = make_entry()
    store.put(structs.replace(entry, arm="[bold]grid[/bold]"))
    assert "[bold]grid[/bold]" in run("list")


def test_similar_shows_the_nearest_but_not_the_entry_itself(run: Run, entries: list[JobRecord]) -> None:
    lines = run("similar", entries[0].id, "-k", 1).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(entries[1].id[:8])
    data = json.loads(run("similar", entries[0].id, "--json"))
    assert [item["id"] for item in data] == [entries[1].id, entries[2].id]
    assert 0 < data[0]["distance"] < data[1]["distance"] < 0.2
    assert 0 < data[0]["least_model_distance"] <= data[0]["model_distance"]
    assert run("similar", entries[0].id, "--max-distance", 0.0) == ""


@pytest.mark.lengthy
def test_similar_draws_the_two_models(run: Run, entries: list[JobRecord], tmp_path: Path) -> None:
    for name, magic in (("match.png", b"\x89PNG"), ("match.svg", b"<?xml")):
        run("similar", entries[0].id, "--plot", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
    with pytest.raises(RegistryError, match="cannot be written"):
        run("similar", entries[0].id, "--plot", tmp_path / "nowhere" / "match.png")
    with pytest.raises(RegistryError, match="no job with a similar model"):
        run("similar", entries[0].id, "--max-distance", 0.0, "--plot", tmp_path / "none.png")


def test_exported_entries_can_be_imported_elsewhere(run: Run, entries: list[JobRecord], tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "all.json", f"--registry={tmp_path / 'other.db'}"
    run("export", "-o", file)
    assert run(elsewhere, "import", file) == "imported: 3, kept as they were: 0\n"
    assert list(open_store(str(tmp_path / "other.db")).all(JobRecord)) == entries[::-1]
    assert run("export") == file.read_text()


def test_records_of_rows_are_exported_with_entries_and_the_newer_ones_stay(
    run: Run, store: Store, tmp_path: Path
) -> None:
    file, elsewhere = tmp_path / "all.json", f"--registry={tmp_path / 'other.db'}"
    entry, ways = make_entry(), [make_way(), make_way(ranks=8)]
    store.put_all([entry, *ways])
    run("export", "-o", file)
    there = open_store(str(tmp_path / "other.db"))
    newer = structs.replace(ways[0], path=SparsePath.GATHER, n_hot=0, created_s=1.75e9)
    there.put(newer)
    assert run(elsewhere, "import", file) == "imported: 2, kept as they were: 1\n"
    assert list(there.all(RowsRecord)) == [newer, ways[1]]
    assert list(there.all(JobRecord)) == [entry]
    assert run(elsewhere, "import", file) == "imported: 1, kept as they were: 2\n"  # entries as new are kept anew


def test_a_bad_way_of_rows_is_named_and_nothing_is_imported(run: Run, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    store.put_all([make_entry(), make_way(), make_way(ranks=8)])
    data = json.loads(run("export"))
    data["row_ways"][1]["n_hot"] = 0
    file.write_text(json.dumps(data))
    store.prune(keep=0)
    with pytest.raises(
        RegistryError,
        match=r"nothing was imported into the .* is damaged: way of rows 2: n_hot must be 1 to 1000 .* found 0",
    ):
        run("import", file)
    assert store.summaries() == []
    assert list(store.all(RowsRecord)) == []


def test_one_way_of_rows_is_exported_and_forgotten(run: Run, store: Store) -> None:
    ways = [make_way(), make_way(ranks=8)]
    store.put_all([make_entry(), *ways])
    data = json.loads(run("export", ways[1].id[:12]))
    assert (data["entries"], data["row_ways"]) == ([], [ways[1].to_json()])
    data = json.loads(run("export", make_entry().id[:12]))
    assert ([entry["key"]["model"] for entry in data["entries"]], data["row_ways"]) == ([make_entry().key.model], [])
    assert run("forget", ways[1].id[:12]) == f"forgotten: {ways[1].id}\n"
    assert list(store.all(RowsRecord)) == ways[:1]
    assert len(store.summaries()) == 1


def test_import_keeps_better_local_entries(run: Run, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "worse.json"
    store.put(make_entry(best_span_s=0.9))
    run("export", "-o", file)
    store.put(make_entry(best_span_s=0.3, created_s=1.7e9 + 1))
    assert json.loads(run("import", file, "--json")) == {"imported": 0, "kept as they were": 1}
    assert store.find(JobRecord, make_entry().id).best_span_s == 0.3


def test_a_bad_import_names_entry_and_field_and_changes_nothing(
    run: Run, entries: list[JobRecord], store: Store, tmp_path: Path
) -> None:
    file = tmp_path / "bad.json"
    data = json.loads(run("export"))
    data["entries"][2]["knobs"]["streams"] = -1
    file.write_text(json.dumps(data))
    store.prune(keep=0)
    with pytest.raises(
        RegistryError, match=r"nothing was imported into the registry .* is damaged: entry 3: knobs\.streams"
    ):
        run("import", file)
    assert store.summaries() == []
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RegistryError, match="is not UTF-8"):
        run("import", file)
    with pytest.raises(RegistryError, match="cannot be read"):
        run("import", tmp_path / "missing.json")


def test_prune_requires_a_selection(run: Run, entries: list[JobRecord], store: Store) -> None:
    with pytest.raises(RegistryError, match="--keep"):
        run("prune")
    assert run("prune", "--keep", 2) == "removed: 1\n"
    assert json.loads(run("prune", "--older-than", 1, "--json")) == {"removed": 2}


def test_forget_removes_one(run: Run, entries: list[JobRecord], store: Store) -> None:
    assert run("forget", entries[1].id[:9]) == f"forgotten: {entries[1].id}\n"
    assert len(store.summaries()) == 2
    with pytest.raises(RegistryError, match=r"must match one stored tuning result \(entry"):
        run("show", entries[1].id)


@pytest.mark.parametrize(
    "arguments", [["prune", "--keep", "-1"], ["prune", "--older-than", "soon"], ["similar", "a", "-k", "0"], []]
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: list[str]) -> None:
    parser = ArgumentParser()
    cli.configure(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)


def test_a_disabled_registry_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRTAKI_REGISTRY", "off")
    with pytest.raises(RegistryError, match="is switched off"):
        run("list")


@pytest.mark.parametrize("prefix", ["", "sqlite:///"])
def test_reading_a_missing_registry_does_not_create_it(run: Run, tmp_path: Path, prefix: str) -> None:
    for action in (["list"], ["show", "0"], ["similar", "0"], ["export"]):
        with pytest.raises(RegistryError, match="there is no registry of tuning results in"):
            run("--registry", f"{prefix}{tmp_path}/typo.db", *action)
    assert not (tmp_path / "typo.db").exists()
