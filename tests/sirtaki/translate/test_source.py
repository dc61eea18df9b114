import libcst as cst
import pytest

from sirtaki.errors import TranslationError
from sirtaki.translate.source import Source

SCRIPT = """
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        def inner():
            return x
        return F.relu(self.layer(x))

def train(model):
    total = 0
    if total:
        pass
    elif model:
        total = 1
"""


def calls(source: Source) -> dict[str, cst.Call]:
    return {source.code(call): call for call in source.all(cst.Call)}


def test_names_are_those_that_were_imported() -> None:
    source = Source(SCRIPT)
    assert source.full_name(calls(source)["F.relu(self.layer(x))"].func) == "torch.nn.functional.relu"
    assert source.imports("torch.nn")
    assert not source.imports("tor")
    assert source.derives("Net", "Module")


def test_a_name_belongs_to_the_function_that_binds_it() -> None:
    source = Source(SCRIPT)
    symbols = {source.symbol(name) for name in source.all(cst.Name)}
    assert {("Net.forward", "x"), ("train", "total"), ("train", "model"), ("", "nn")} <= symbols
    assert ("Net.forward.inner", "x") not in symbols
    assert source.symbol(calls(source)["self.layer(x)"].func) == ("class Net", "layer")


def test_what_stands_in_an_elif_has_the_whole_if_as_its_statement() -> None:
    source = Source(SCRIPT)
    last = list(source.all(cst.Integer))[-1]
    inner = source.statement(last)
    assert source.code(inner) == "total = 1"
    branch = next(source.all(cst.If))
    assert isinstance(branch.orelse, cst.If)
    assert source.statement(branch.orelse.test) is branch


def test_what_is_no_python_is_refused_with_its_line() -> None:
    with pytest.raises(TranslationError, match="line 2: is no Python"):
        Source("x = 1\ndef (:\n")
