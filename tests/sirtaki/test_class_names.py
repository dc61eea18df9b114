"""Structure that a reader relies on: unique class names, and classes with short interfaces."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

MOST_METHODS = 16
"""Most public methods of a class. Properties do not count."""

LARGER = {
    "SirtakiProcessGroup": "PyTorch's ProcessGroup prescribes its methods",
    "ControlPlane": "it has a method for each kind of collective operation, as MPI's communicators have",
    "GradientPipeline": "hooks report gradients to it, optimizers end its iterations, and the tuner changes its plans",
    "Device": "it stands for all that CUDA's streams, events and memory offer, with a host that has none of them",
    "CudaDevice": "it overrides nearly all methods of Device",
    "Source": "it answers questions about the syntax of a script, one a method",
}
"""Classes that have more, and why."""


def classes(*parts: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    for part in parts:
        for path in (ROOT / part).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.ClassDef):
                        yield path.relative_to(ROOT), node


def test_no_class_name_is_defined_twice() -> None:
    """Names that differ only by a leading underscore count as equal."""
    places = defaultdict(list)
    for path, node in classes("autotune", "bench", "comm", "registry", "sirtaki"):
        places[node.name.lstrip("_")].append(f"{path}:{node.lineno} {node.name}")
    assert len(places) > 500  # the folders are found
    assert not {name: found for name, found in places.items() if len(found) > 1}


def is_method(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
        return False
    names = {getattr(one, "id", getattr(one, "attr", "")) for one in node.decorator_list}
    return not names & {"property", "cached_property", "setter"}


def test_a_class_has_few_public_methods_or_a_reason() -> None:
    counts = {
        node.name: sum(map(is_method, node.body)) for _, node in classes("autotune", "comm", "registry", "sirtaki")
    }
    assert {name for name, count in counts.items() if count > MOST_METHODS} == set(LARGER)
