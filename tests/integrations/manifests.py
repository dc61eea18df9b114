"""Renders deploy/kubernetes as kustomize does, as far as its overlays need it."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"

OVERLAYS = ("job", "pytorchjob", "trainjob", "mpijob")

Node = Any  # what YAML holds


def training() -> dict[str, Node]:
    """Return the only file that a user fills in."""
    return yaml.safe_load((KUBERNETES / "base" / "training.yaml").read_text())


def rendered(overlay: str, values: dict[str, Node]) -> list[dict[str, Node]]:
    """Return the objects that `kubectl apply -k` would send, with `values` in place of base/training.yaml.

    Raises:
        KeyError, IndexError: a replacement names a missing field.
    """
    own = yaml.safe_load((KUBERNETES / overlay / "kustomization.yaml").read_text())
    assert set(own) == {"apiVersion", "kind", "resources", "components"}
    assert own["components"] == ["../base"]
    objects = [
        found for name in own["resources"] for found in yaml.safe_load_all((KUBERNETES / overlay / name).read_text())
    ]
    base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    for replacement in base["replacements"]:
        value = _source(values, replacement["source"])
        for target in replacement["targets"]:
            for found in objects:
                if found["kind"] == target["select"]["kind"]:
                    for path in target["fieldPaths"]:
                        _replace(found, _words(path), value, target.get("options", {}))
    return objects


def pod_templates(node: Node) -> Iterator[dict[str, Node]]:
    """Every pod template in an object."""
    if isinstance(node, dict):
        spec = node.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield node
        for child in node.values():
            yield from pod_templates(child)
    elif isinstance(node, list):
        for child in node:
            yield from pod_templates(child)


def _source(values: dict[str, Node], source: dict[str, str]) -> Node:
    assert source["kind"] == values["kind"]
    node: Node = values
    for word in source["fieldPath"].split("."):
        node = node[word]
    return node


def _words(path: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|[^.\[\]]+", path)


def _step(node: Node, word: str) -> str | int:
    """Return the key or index in `node` that a word of a field path refers to."""
    if isinstance(node, dict):
        key = word.strip("[]")
        node[key]  # KeyError: kustomize refuses, too
        return key
    if word.startswith("["):
        name, _, expected = word.strip("[]").partition("=")
        (index,) = [index for index, item in enumerate(node) if item.get(name) == expected]
        return index
    return int(word)


def _replace(node: Node, words: list[str], value: Node, options: dict[str, Node]) -> None:
    for word in words[:-1]:
        node = node[_step(node, word)]
    last = _step(node, words[-1])
    old = node[last]
    if delimiter := options.get("delimiter"):
        parts = old.split(delimiter)
        parts[options["index"]] = str(value)
        node[last] = delimiter.join(parts)
    elif isinstance(old, str):  # a text stays one
        node[last] = str(value)
    else:
        node[last] = copy.deepcopy(value)
