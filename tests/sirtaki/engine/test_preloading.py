"""Modules that PyTorch imports late are loaded before a rank joins. A process without PyTorch stays without it."""

import subprocess
import sys

import pytest

CODE = """
import sys

import pytest
{first}
from sirtaki.engine.generations import load_what_training_needs
load_what_training_needs()
before = set(sys.modules)
{then}
print(*sorted(name for name in set(sys.modules) - before if name.startswith("torch")))
print("torch" in sys.modules)
"""


def loaded_late(first: str, then: str) -> list[str]:
    code = CODE.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


@pytest.mark.integration
def test_an_optimizer_loads_nothing_more() -> None:
    then = "torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.1)"
    assert loaded_late("import torch", then) == ["", "True"]


def test_a_process_without_pytorch_stays_without_it() -> None:
    assert loaded_late("", "") == ["", "False"]
