"""`--config-file`: options from a file, in horovodrun's layout or flat.

A key is an option without its dashes (`fusion-threshold-mb: 32`, underscores allowed). In a section its name may be
left out of the key (`timeline: {filename: t.json}` = `--timeline-filename t.json`), and `enabled` switches the
section (`autotune: {enabled: true}` = `--autotune`).
"""

import difflib
import importlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sirtaki.errors import ConfigError

# Horovod's names that are not the option's.
_RENAMED = {"logging-level": "log-level", "logging-hide-timestamp": "log-without-timestamp"}


def arguments_from_file(path: Path, options: Mapping[str, bool]) -> list[str]:
    """The file's content as command-line words.

    Args:
        path: a `.json` or `.toml` file, anything else is read as YAML.
        options: name of each option → whether it takes an argument.

    Raises:
        ConfigError: the file cannot be read, or names an option that does not exist.
    """
    words: list[str] = []
    for key, value in _entries(_load(path)):
        words += _words(key, value, options, path)
    return words


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix:
            case ".json":
                content = json.loads(text)
            case ".toml":
                content = tomllib.loads(text)
            case _:
                content = _load_yaml(text, path)
    except (OSError, ValueError) as err:
        raise ConfigError(f"--config-file {path} cannot be read: {err}") from err
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config-file {path} must hold options and values, not {type(content).__name__}")
    return content


def _load_yaml(text: str, path: Path) -> Any:  # Any: whatever the file holds
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as err:
        raise ConfigError(f"--config-file {path}: YAML needs `pip install pyyaml`; .toml and .json do not") from err
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as err:
        raise ConfigError(f"--config-file {path} is not YAML: {err}") from err


def _entries(content: Mapping[str, Any], section: str = "") -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in content.items():
        key = str(name).replace("_", "-")
        if isinstance(value, Mapping):
            yield from _entries(value, key)
        elif value is not None:
            yield (section, key), value


def _words(place: tuple[str, str], value: Any, options: Mapping[str, bool], path: Path) -> list[str]:
    section, key = place
    whole = f"{section}-{key}"
    names = (section,) if key == "enabled" else (_RENAMED.get(whole, whole), key)
    if value is False:
        # `false` = the option's negative where it has one, else the option is simply not given.
        negative = next((f"no-{name}" for name in names if f"no-{name}" in options), None)
        if negative is not None:
            return [f"--{negative}"]
    name = next((name for name in names if name in options), None)
    if name is None and f"no-{names[0]}" in options:
        return []
    if name is None:
        near = difflib.get_close_matches(key, options, n=1, cutoff=0)[0]
        raise ConfigError(f"--config-file {path}: {key!r} is not an option; the nearest one is {near!r}")
    if options[name]:
        return [f"--{name}", str(value)]
    return [f"--{name}"] if value else []
