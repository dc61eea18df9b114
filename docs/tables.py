"""Generate the parts of the documents that have a source: API, settings, options, decisions, figures, listings.

    python docs/tables.py            # replace the text between `<!-- begin: NAME -->` and `<!-- end: NAME -->`
    python docs/tables.py --check    # print the names of outdated parts; exit code 1 if there are any

`make docs` and a test run the check.
"""

import argparse
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache, partial
from itertools import chain
from pathlib import Path

import griffe

from sirtaki.cli.__main__ import COMMANDS
from sirtaki.engine.settings import REMOVED, VARIABLES, WITHOUT_EFFECT, Settings, Variable
from sirtaki.run.options import build_parser

DOCS = Path(__file__).resolve().parent


SETTING_GROUPS: Mapping[str, Sequence[str]] = {
    "Tuning": ("tune", "warmup_iterations", "refine_until", "freeze_after"),
    "Fix a setting": ("unit_bytes", "streams", "transport", "algorithm", "plan", "sparse"),
    "Allow more settings": ("lossy", "fsdp_memory", "overlap_forward"),
    "Results, logs and measurements": (
        *("registry", "log_level", "log_time", "trial_log", "profile", "metrics", "timeline", "timeline_mark_cycles"),
    ),
    "Models and gradients": ("attach", "unused_as_none", "check_nan", "flight_entries"),
    "Start, network and failures": (
        *("gloo_interface", "control", "secret", "local_size", "start_timeout_s", "heartbeat_s"),
        *("stall_check", "stall_warning_s", "stall_shutdown_s"),
    ),
    "Elastic jobs and checkpoints": ("checkpoint_dir", "checkpoint_s", "elastic_timeout_s"),
}
"""Fields of `Settings` that environment variables set, by the title of their table."""


def settings_table() -> str:
    """Return tables of the fields of `Settings` with their environment variables, Sirtaki's own first."""
    meanings, defaults = _attributes(Settings.__doc__ or ""), {field.name: field.default for field in fields(Settings)}
    if missing := {variable.field for variable in VARIABLES}.symmetric_difference(chain(*SETTING_GROUPS.values())):
        raise ValueError(f"SETTING_GROUPS must name every setting once; it differs in {missing}")

    def row(name: str) -> Sequence[str]:
        variables = [variable for variable in VARIABLES if variable.field == name][::-1]
        accepts = dict.fromkeys(variable.accepts for variable in variables)
        default = defaults[name]
        shown = _default(name, not default if all(map(_inverted, variables)) else default)
        names = (f"`{variable.name}`{' (1 = off)' if _inverted(variable) else ''}" for variable in variables)
        return "<br>".join(names), meanings[name].rstrip("."), "<br>".join(accepts), shown

    titles = ("variable", "meaning", "accepts", "default")
    return "\n\n".join(
        f"**{what}**\n\n{_table(titles, list(map(row, names)))}" for what, names in SETTING_GROUPS.items()
    )


def without_effect_table() -> str:
    """Return a table of Horovod's environment variables that are accepted and have no effect."""
    return _table(("variable", "why nothing follows from it"), [(f"`{n}`", why) for n, why in WITHOUT_EFFECT.items()])


def removed_table() -> str:
    """Return a table of environment variables that only earlier releases read, with their replacements."""
    return _table(("variable", "what takes its place"), [(f"`{n}`", use) for n, use in REMOVED.items()])


def launcher_table() -> str:
    """Return a table of the options of `sirtakirun`, and a list of horovodrun's options that it accepts and ignores."""
    parser = build_parser()
    accepted, _, flags = " ".join((parser.epilog or "").split()).partition(": ")
    return f"{_options(parser)}\n\n{accepted.capitalize()}: {', '.join(f'`{flag}`' for flag in flags.split(', '))}."


def command_table(name: str) -> str:
    """Return tables of the options of `sirtaki NAME` and of each of its actions."""
    parser = argparse.ArgumentParser(prog=f"sirtaki {name}", add_help=False)
    importlib.import_module(COMMANDS[name][0]).configure(parser)
    tables = [_options(parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            tables += [
                f"**`sirtaki {name} {choice}`**: {helps[choice]}\n\n{_options(sub)}"
                for choice, sub in action.choices.items()
            ]
    return "\n\n".join(table for table in tables if table)


def listing(script: str) -> str:
    """Return a script of the repository as a code block, or a Markdown page unchanged except for its links."""
    if script.endswith(".md"):
        text = (DOCS.parent / script).read_text(encoding="utf-8").strip()
        return text.replace("](docs/", "](")  # because the text is inserted into a page in docs/
    language = {".py": "python", ".sh": "bash"}.get(Path(script).suffix, "")
    return f"```{language}\n{(DOCS.parent / script).read_text(encoding='utf-8').strip()}\n```"


@cache
def _package() -> griffe.Object:
    """Load the package `sirtaki` from its source, without importing it."""
    options = griffe.GoogleOptions(
        returns_multiple_items=False, returns_named_value=False, warnings=False, warn_missing_types=False
    )
    loader = griffe.GriffeLoader(search_paths=[DOCS.parent], docstring_parser="google", docstring_options=options)
    package = loader.load("sirtaki")
    loader.resolve_aliases(external=False)
    assert isinstance(package, griffe.Object)
    return package


PUBLIC_PATHS = {
    "sirtaki.integrations.lightning.SirtakiStrategy": "sirtaki.lightning.SirtakiStrategy",
    "sirtaki.integrations.ray.executor.RayExecutor": "sirtaki.ray.RayExecutor",
    "sirtaki.integrations.ray.train.SirtakiConfig": "sirtaki.ray.SirtakiConfig",
    "sirtaki.integrations.ray.ray_logger.log": "sirtaki.ray.ray_logger.log",
}
"""Path from which users import an object, by the path of its source, for objects that are imported lazily."""


def api(path: str) -> str:
    """Return the signature and the docstring of a public object, and of its members that have a docstring."""
    found = _package()[path.removeprefix("sirtaki.")]
    found = found.final_target if isinstance(found, griffe.Alias) else found
    members = [m for m in found.members.values() if not (m.is_alias or m.name.startswith("_")) and m.docstring]
    if found.is_module:
        return "\n\n".join(api(f"{path}.{member.name}") for member in members)
    parts = [f"### `{PUBLIC_PATHS.get(path, path)}`"]
    if not found.is_attribute and (signature := found.signature(name=found.name)):
        parts.append(f"```python\n{_wrapped(signature)}\n```")
    if found.is_class and (bases := [f"`{base}`" for base in found.bases if not str(base).startswith("_")]):
        parts.append(f"Base: {', '.join(bases)}.")
    parts += _sections(found)
    if found.is_class:
        if "__init__" in found.members:
            parts += _sections(found.members["__init__"])[1:]  # without the first sentence, such as "Configure the …"
        for member in members:
            name = member.name if member.is_attribute else member.signature()
            parts += [f"**`{name}`**", *_sections(member)]
    return "\n\n".join(parts)


def _wrapped(signature: str) -> str:
    """Return a signature with one parameter a line if it is long."""
    return signature if len(signature) <= 100 else re.sub(r", (?=\*{0,2}\w+:|\*,)", ",\n    ", signature)


def _sections(found: griffe.Object) -> list[str]:
    """Return the docstring of an object as paragraphs and lists."""
    parts = []
    for section in found.docstring.parsed if found.docstring else ():
        kind, value = section.kind.value, section.value
        if kind == "text":
            parts.append(value)
        elif kind == "examples":
            parts += [f"```pycon\n{text}\n```" if part.value == "examples" else text for part, text in value]
        elif kind == "admonition":
            parts.append(f"*{section.title}*: {value.description}")
        else:
            names = [getattr(item, "name", "") or (kind == "raises" and str(item.annotation)) for item in value]
            items = (" ".join(item.description.split()) for item in value)
            lines = [f"- `{name}`: {text}" if name else text for name, text in zip(names, items, strict=True)]
            parts += [f"*{ {'parameters': 'Args'}.get(kind, kind.capitalize()) }*", "\n".join(lines)]
    return parts


FIGURES: Sequence[tuple[str, str, str, str]] = (
    (
        "one host, 4 ranks, 60 ms of emulated compute",
        "step",
        "| resnet50, 4 ranks: untuned step",
        "| resnet50, 4 ranks: tuned step",
    ),
    (
        "four emulated nodes, link 400 Mbit/s, connections at most 100 Mbit/s",
        "netlab",
        "| capped | untuned |",
        "| capped | tuned |",
    ),
    ("the same, divided by the best DDP tuned by hand", "netlab", "", "| tuned step / the best DDP tuned by hand"),
    ("four emulated nodes, one connection fills the link", "netlab", "| equal | untuned |", "| equal | tuned |"),
)
"""Rows of the README's table: description, name of the kept result, and how the lines in the result begin that hold the
untuned and the tuned figure."""


def figures_table() -> str:
    """Return a table of step times with ResNet-50's gradients, divided by DDP's step time."""
    rows = []
    for what, stem, *lines in FIGURES:
        text = (DOCS.parent / "bench" / "results" / f"{stem}.md").read_text(encoding="utf-8")
        rows.append((what, *(_ratio(text, line) if line else "not compared" for line in lines)))
    return _table(("step ÷ DDP's", "untuned", "tuned"), rows)


def _ratio(text: str, begin: str) -> str:
    """Return the figure in the line of a result that begins with `begin`, with two decimals."""
    (line,) = (line for line in text.splitlines() if line.startswith(begin))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return f"{float(cells[1] if cells[-1] in ('met', '**missed**') else cells[3].split(' ')[0]):.2f}"


def targets_table() -> str:
    """Return a table of the targets in the kept results of benchmarks, missed targets first."""
    rows = []
    for path in sorted((DOCS.parent / "bench" / "results").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        command, taken = (
            re.search(r"^    (python .+)$", text, re.M),
            re.search(r"^- Taken (\S+)T\S*, commit ([\w-]+)", text, re.M),
        )
        for claim, measured, limit, verdict in re.findall(
            r"^\| (.+?) \| (.+?) \| (.+?) \| (met|\*\*missed\*\*) \|$", text, re.M
        ):
            origin = (f"`{command[1]}`" if command else "", f"{taken[1]}, {taken[2]}" if taken else "")
            rows.append((path.stem, claim, measured, limit, verdict, *origin))
    rows.sort(key=lambda row: row[4] == "met")
    return _table(("result", "claim", "measured", "target", "", "command", "taken"), rows)


SUBJECTS = (
    "Launching and joining",
    "Gradients",
    "Tuning and the registry",
    "Elastic jobs",
    "Interfaces to other programs",
)
"""Subjects of decisions, in the order of the list. The line below the title of a record names its subject."""


def decisions_list() -> str:
    """Return a list of the titles of all decision records, grouped by subject."""
    found: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title, _, subject = path.read_text(encoding="utf-8").splitlines()[:3]
        number, sentence = re.findall(r"^# (\d+)\. (.+)$", title)[0]
        found[subject.strip("*")].append(f"- {sentence} ([{number}]({path.name})).")
    return "\n\n".join("\n".join([f"**{subject}**", "", *sentences]) for subject, sentences in found.items())


TABLES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "settings": ("reference/settings.md", settings_table),
    "without effect": ("reference/settings.md", without_effect_table),
    "removed settings": ("reference/settings.md", removed_table),
    "sirtakirun": ("reference/cli.md", launcher_table),
    **{f"sirtaki {name}": ("reference/cli.md", lambda name=name: command_table(name)) for name in COMMANDS},
    "decisions": ("decisions/index.md", decisions_list),
    "figures": ("../README.md", figures_table),
    "targets": ("explanation/targets.md", targets_table),
    **{
        f"{kind} {what}": (str(page.relative_to(DOCS)), partial(listing if kind == "listing" else api, what))
        for page in sorted(DOCS.rglob("*.md"))
        for kind, what in re.findall(r"<!-- begin: (listing|api) (\S+) -->", page.read_text(encoding="utf-8"))
    },
}
"""Name of each generated part → its page, and the function that returns its text."""


def updated(text: str, name: str, table: str) -> str:
    """Return the text of a page with the generated part `name` replaced by `table`.

    Raises:
        ValueError: the page does not contain the begin and end comments of the part exactly once.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the page needs one {begin} and one {end}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def outdated() -> Iterator[tuple[str, Path, str]]:
    """Yield the name, path and new text of the page for each outdated part."""
    for name, (page, render) in TABLES.items():
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        new = updated(text, name, render())
        if new != text:
            yield name, path, new


def _attributes(docstring: str) -> dict[str, str]:
    """Return the entries in the `Attributes:` section of a docstring."""
    _, _, section = inspect.cleandoc(docstring).partition("Attributes:")  # Python 3.13 cleans it itself
    entries: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if found := re.match(r" {4}(\w+): (.*)", line):
            name, entries[found[1]] = found[1], found[2]
        elif line.strip() and name:
            entries[name] += " " + line.strip()
    return entries


def _inverted(variable: Variable) -> bool:
    """Return whether the value 1 of a variable sets its field to False."""
    return variable.accepts.startswith("1 or 0") and variable.parse("1") is False


def _default(name: str, value: object) -> str:
    if name == "log_level" and isinstance(value, int):
        return logging.getLevelName(value).lower()
    if name == "unused_as_none":
        return "zeros"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, Enum):
        return str(value.value)
    return "not set" if value in (None, ()) else f"{value:g}" if isinstance(value, float) else str(value)


def _options(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS or action.dest == "help":
            continue
        taken = action.metavar or action.dest.upper()
        takes = "" if action.nargs == 0 else f" {taken if isinstance(taken, str) else ' '.join(taken)}"
        what = ", ".join(f"`{flag}{takes}`" for flag in action.option_strings) or f"`{takes.strip()}`"
        rows.append((what, (action.help or "") % {"default": action.default}))
    return _table(("option", "meaning"), rows) if rows else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def main() -> int:
    """Rewrite the outdated parts; with `--check`, print their names only."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a part is out of date")
    check = parser.parse_args().check
    names = []
    for name, path, text in outdated():  # reads a page with two parts again after the first is written
        names.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
    if names:
        status = "out of date, run `python docs/tables.py`" if check else "rewritten"
        print(f"{status}: {', '.join(names)}")
    return int(check and bool(names))


if __name__ == "__main__":
    sys.exit(main())
