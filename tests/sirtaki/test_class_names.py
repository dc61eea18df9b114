"""A class name has one meaning in the whole repository, so that a reader who searches for it finds one class."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_class_name_is_defined_twice() -> None:
    """Names that differ only by a leading underscore count as equal."""
    places = defaultdict(list)
    for part in ("autotune", "bench", "comm", "registry", "sirtaki"):
        for path in (ROOT / part).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.ClassDef):
                        places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert len(places) > 500  # the folders are found
    assert not {name: found for name, found in places.items() if len(found) > 1}
