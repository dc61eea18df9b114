"""The documents match the code: tables, snippets, messages, names and links."""

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import sirtaki.analysis
import sirtaki.autotune
import sirtaki.profiler
import sirtaki.run
import sirtaki.torch
from sirtaki.cli.__main__ import COMMANDS
from sirtaki.engine.launchers import AGENT, BAR
from sirtaki.engine.settings import REMOVED, VARIABLES, WITHOUT_EFFECT
from sirtaki.run.launch import OUTER_RANK
from sirtaki.run.options import build_parser, parse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WAYS_IN = ("unmodified", "optimizer", "keep-ddp", "torch-distributed", "sharded")
OUTLINE = ["Change", "Run", "What you see", "Check that it works", "Costs", "Limits", "Turn it off"]
TUTORIALS = sorted((DOCS / "tutorial").glob("from-*.md"))
SCRIPTS = sorted((ROOT / "examples" / "tutorial").glob("*.py"))


@cache
def script(name: str) -> ModuleType:
    """Import a program of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"documents_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def names_after(page: str, package: str) -> list[str]:
    return re.findall(rf"^<!-- begin: api {re.escape(package)}\.([\w.]+) -->$", (DOCS / page).read_text(), re.MULTILINE)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.lengthy
def test_the_tables_match_the_code() -> None:
    outdated = [name for name, _, _ in script("tables").outdated()]
    assert not outdated, "run `python docs/tables.py`"


def test_pictures_show_the_kept_results() -> None:
    assert list(script("pictures").outdated()) == [], "run `python docs/pictures.py`"


def test_every_setting_is_documented() -> None:
    page = (DOCS / "reference" / "settings.md").read_text()
    names = [*(variable.name for variable in VARIABLES), *WITHOUT_EFFECT]
    assert [name for name in names if f"`{name}`" not in page] == []


SET_BY_LAUNCHERS = {AGENT, BAR, "HOROVOD_ELASTIC", *(f"HOROVOD_{name}" for name in OUTER_RANK)}
"""Variables that a script may read, and that are no settings."""


def test_no_document_names_a_setting_that_does_not_exist() -> None:
    known = {variable.name for variable in VARIABLES} | set(WITHOUT_EFFECT)
    for page in [ROOT / "README.md", *PAGES]:
        named = set(re.findall(r"\b(?:SIRTAKI(?!_TEST)|HOROVOD)_[A-Z_]*[A-Z]\b", page.read_text()))
        past = set(REMOVED) if page.parent.name == "decisions" or page.name == "settings.md" else set()
        told = SET_BY_LAUNCHERS if page.name == "settings.md" else set()
        assert named <= known | past | told, page


def test_every_command_and_option_is_documented() -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    assert [name for name in COMMANDS if f"## sirtaki {name}\n" not in page] == []
    shown = [action for action in build_parser()._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    flags = [flag for action in shown for flag in action.option_strings]
    assert "--as-horovod" in flags
    assert [flag for flag in flags if not re.search(rf"`{re.escape(flag)}[` ]", page)] == []


def test_every_decision_is_listed() -> None:
    page = (DOCS / "decisions" / "index.md").read_text()
    records = [path.name for path in (DOCS / "decisions").glob("[0-9]*.md")]
    assert len(records) >= 25
    assert [name for name in records if f"]({name})" not in page] == []


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_api_page_holds_every_public_name_once() -> None:
    operations = re.findall(r"^\| `(\w+)` \|", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    named = names_after("reference/api.md", "sirtaki.torch")
    elastic = [name.removeprefix("elastic.") for name in named if name.startswith("elastic.")]
    plain = [name for name in named if "." not in name] + operations
    # A module, a package and an alias, which the page tells of in words.
    assert sorted([*plain, "elastic", "optim", "mpi_ops", "HorovodInternalError"]) == sorted(sirtaki.torch.__all__)
    assert sorted(elastic) == sorted(sirtaki.torch.elastic.__all__)
    assert names_after("reference/api.md", "sirtaki.run") == sirtaki.run.__all__
    assert names_after("reference/api.md", "sirtaki.profiler") == sirtaki.profiler.__all__
    assert names_after("reference/api.md", "sirtaki.analysis") == sirtaki.analysis.__all__


def test_the_page_on_arms_lists_everything_that_can_be_imported_for_them() -> None:
    assert sorted(names_after("reference/arms.md", "sirtaki.autotune")) == sorted(sirtaki.autotune.__all__)


def test_the_example_of_an_arm_imports_from_one_place() -> None:
    source = (ROOT / "examples" / "custom_arm.py").read_text()
    assert set(re.findall(r"^from (sirtaki\S*)", source, re.MULTILINE)) == {"sirtaki.autotune"}


# ── snippets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_readme_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 620  # with the table of figures


@pytest.mark.parametrize("name", WAYS_IN)
def test_the_pages_of_all_ways_in_have_one_outline(name: str) -> None:
    titles = re.findall(r"^## (.+)$", (DOCS / "how-to" / f"{name}.md").read_text(), re.MULTILINE)
    assert titles[: len(OUTLINE)] == OUTLINE


def included(page: Path) -> list[str]:
    """Whole scripts that a page shows."""
    return re.findall(r"^<!-- begin: listing (\S+\.py) -->$", page.read_text(), re.MULTILINE)


def test_every_script_of_the_tutorials_is_shown_there() -> None:
    shown = {path for page in TUTORIALS for path in included(page)}
    assert shown == {str(path.relative_to(ROOT)) for path in SCRIPTS}


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_is_in_its_scripts(page: Path) -> None:
    scripts = [(ROOT / path).read_text() for path in included(page)]
    assert scripts
    for block in blocks(page, "python"):
        assert any(block in script for script in scripts), block


def test_the_changes_in_a_tutorial_lead_from_one_script_to_the_other() -> None:
    page = DOCS / "tutorial" / "from-pytorch.md"
    before, after = ((ROOT / path).read_text().splitlines() for path in included(page))
    changes = [line for block in blocks(page, "diff") for line in block.splitlines()]
    assert changes
    for line in changes:
        assert line[0] == "+" or line[1:] in before, line
        assert line[0] == "-" or line[1:] in after, line


def command_lines() -> list[str]:
    """Commands of ours in blocks of the documents, without variables before, comments and redirections behind."""
    found = []
    for page in [ROOT / "README.md", *PAGES]:
        for line in re.findall(r"^    ([A-Z\w= ./{}]*?\bsirtaki(?:run)? .*)$", page.read_text(), re.MULTILINE):
            words = re.split(" #| > ", line)[0].partition("&& ")
            command = words[2] or words[0]
            found.append(re.sub(r"^(\w+=\S+ )*", "", command).strip())
    return [command for command in found if re.match(r"sirtaki(run)? ", command) and "[options]" not in command]


def test_every_command_line_in_the_documents_can_be_parsed() -> None:
    commands = command_lines()
    assert len(commands) > 20
    for command in commands:
        program, *words = shlex.split(command)
        if program == "sirtakirun":
            assert parse(words).command, command
            continue
        name, *options = words
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(COMMANDS[name][0]).configure(parser)
        parser.parse_args(options)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

NOT_OURS = {
    "environment variable RANK expected",
    "No module named 'horovod'",
    "The PMIx server's listener thread failed to start …",
}


@cache
def texts() -> list[str]:
    """Every text of the code as a reader may see it, with … for what is filled in."""
    found = []
    for part in ("sirtaki", "comm", "autotune", "registry"):
        for path in (ROOT / part).rglob("*.py"):
            found += list(_texts(ast.parse(path.read_text())))
    return found


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d)?[sdf]", "…", node.value)


@pytest.mark.lengthy
def test_every_message_in_the_troubleshooting_page_exists() -> None:
    page = (DOCS / "how-to" / "troubleshooting.md").read_text()
    messages = [message for message in re.findall(r"^### `(.+)`$", page, re.MULTILINE) if message not in NOT_OURS]
    assert len(messages) > 30
    unknown = []
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
        if not any(pattern.search(text) for text in texts()):
            unknown.append(message)
    assert unknown == []


# ── links and words ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_readme_has_at_most_500_words() -> None:
    text = re.sub(r"<!--.*?-->|\]\([^)]*\)", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(re.findall(r"\S*\w\S*", text)) <= 500


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_pages_at_the_top_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", (ROOT / name).read_text())
    local = [(path, anchor) for path, anchor in links if "://" not in path]
    assert local or name != "README.md"
    for path, anchor in local:
        assert (ROOT / path).exists(), path
        if anchor:
            titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_pages_that_have_moved_lead_to_a_heading_that_exists() -> None:
    moved = sorted(DOCS.rglob("*.html"))
    assert moved
    for page in moved:
        path, anchor = re.findall(r'href="([^#"]+)#([^"]+)"', page.read_text())[0]
        titles = re.findall(r"^#+ (.+)$", (page.parent / path).with_suffix(".md").read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}, page
        assert not page.with_suffix(".md").exists(), page


def test_pages_reach_no_other_host() -> None:
    """Pictures, scripts and styles lie in the site; links that a reader clicks are another matter."""
    for page in PAGES:
        assert re.findall(r"!\[[^\]]*\]\(https?:|<(?:img|script|link)[^>]*https?:", page.read_text()) == [], page


def test_the_code_refers_to_pages_that_exist() -> None:
    referred = set()
    for part in ("sirtaki", "comm", "autotune", "registry", "bench", "examples"):
        for path in (ROOT / part).rglob("*.py"):
            referred |= {(path, page) for page in re.findall(r"docs/([\w/-]+\.md)", path.read_text())}
    assert [(str(path), page) for path, page in referred if not (DOCS / page).exists()] == []


def test_the_architecture_names_rooms_that_exist() -> None:
    page = (DOCS / "explanation" / "architecture.md").read_text()
    rooms = set(re.findall(r"`((?:comm|autotune|registry|sirtaki)(?:/[\w.]+)*)`", page))
    assert len(rooms) > 12
    assert [room for room in sorted(rooms) if not (ROOT / room).exists()] == []


def test_every_missed_target_has_a_reason() -> None:
    text = (DOCS / "explanation" / "targets.md").read_text()
    missed = {row.split("|")[1].strip() for row in text.splitlines() if "| **missed** |" in row}
    said = set(re.findall(r"\*\*(\w+)\*\*[,:]", text[text.index("## Why") :]))
    assert said == missed
