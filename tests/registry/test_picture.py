"""Two graphs side by side: what is the same, what has changed and what is only there can be told."""

import builtins
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conformance.graphs import chain_graph

from sirtaki.errors import RegistryError
from sirtaki.registry import graph as picture
from sirtaki.registry.graph import Graph, Node, _colour, _places, draw_match

TITLES = ("this job", "another one")


def test_a_node_stands_one_step_below_the_last_that_it_needs_and_branches_beside_each_other() -> None:
    nodes = tuple(Node("Add", "", number) for number in range(5))
    edges = ((0, 1, ""), (0, 2, ""), (1, 3, ""), (2, 3, ""), (0, 3, ""))
    graph = Graph(nodes=nodes, edges=edges, directed=True)
    assert _places(graph) == [(0, 0), (0, -1), (1, -1), (0, -2), (1, 0)]
    assert _places(Graph(nodes=(), edges=(), directed=True)) == []


def test_colours_tell_the_same_from_the_changed_and_the_lonely() -> None:
    one, other = Node("Add", "", 3), Node("Add", "", 4)
    there = Graph(nodes=(one,), edges=(), directed=True)
    assert _colour(one, there, 0) == picture._SAME
    assert _colour(other, there, 0) == picture._CHANGED
    assert _colour(one, there, -1) == picture._ALONE


def test_a_picture_names_both_sides_and_labels_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "match.svg"
    draw_match(chain_graph([5, 7]), chain_graph([5] * 70), path, titles=TITLES, caption="distance 0.5")
    text = path.read_text()
    ElementTree.fromstring(text)
    for words in (*TITLES, "distance 0.5", "the same in both", "changed", "only here"):
        assert f"<!-- {words} -->" in text
    labels = text.count(f"<!-- {chain_graph([5]).nodes[0]!s:.40}")
    assert labels == 1  # of the small one; 70 cannot be read


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    graph = chain_graph([5])
    for path in (tmp_path / "nowhere" / "match.svg", tmp_path / "match.nothing"):
        with pytest.raises(RegistryError, match=f"the picture .*{path.name} cannot be written"):
            draw_match(graph, graph, path, titles=TITLES, caption="")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RegistryError, match=r"pip install 'sirtaki\[plot\]'"):
        draw_match(chain_graph([5]), chain_graph([5]), tmp_path / "x.svg", titles=TITLES, caption="")
