"""What is read in a script: names, flows, loops that train, means and sums; and how it is edited."""

import libcst as cst
import pytest

from sirtaki.translate.meaning import (
    ALL,
    COUNT,
    OWN,
    Over,
    Training,
    Value,
    all_alike,
    collected,
    combined,
    either,
)
from sirtaki.translate.source import Edits, Flows, Kind, Source

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


LOADERS = """
import torch
from torch.utils.data import DataLoader

def loaders(data):
    return DataLoader(data, 2), DataLoader(data, 3)

class Trainer:
    def __init__(self, train, test):
        self.train, self.test = train, test
        self.optimizer = torch.optim.SGD([], lr=1)

    def fit(self):
        for batch in enumerate(self.train):
            self.optimizer.step()

def forever(loader):
    while True:
        for batch in loader:
            yield batch

first, second = loaders([])
trainer = Trainer(first, second)
endless = forever(trainer.test)
either = {"a": first, "b": second}["a"]
"""


def held(flows: Flows, name: str) -> list[str]:
    source = flows.source
    node = next(node for node in source.all(cst.Name) if node.value == name and source.function_of(node) == "")
    return sorted(source.code(site.call) for site in flows.holds(node, Kind.LOADER))


def test_loaders_are_followed_through_tuples_instances_generators_and_dictionaries() -> None:
    flows = Flows(Source(LOADERS))
    assert held(flows, "first") == ["DataLoader(data, 2)"]
    assert held(flows, "second") == ["DataLoader(data, 3)"]
    assert held(flows, "endless") == ["DataLoader(data, 3)"]
    assert held(flows, "either") == ["DataLoader(data, 2)", "DataLoader(data, 3)"]
    assert len(flows.relays) == 1
    (loop,) = [loop for loop in flows.source.all(cst.For) if loop not in flows.relays]
    assert [flows.source.code(site.call) for site in flows.holds(loop.iter, Kind.LOADER)] == ["DataLoader(data, 2)"]


def test_a_call_is_followed_to_the_function_that_it_enters() -> None:
    flows = Flows(Source(LOADERS))
    entered = {
        flows.source.code(call.func): [flows.source.name_of(function) for function in flows.callees(call)]
        for call in flows.source.all(cst.Call)
    }
    assert entered["loaders"] == ["loaders"]
    assert entered["Trainer"] == ["Trainer.__init__"]
    assert entered["DataLoader"] == []


HEAD = """
import torch
from torch.utils.data import DataLoader
train_loader, test_loader = DataLoader([], 2, shuffle=True), DataLoader([], 2)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1)
"""


def training(code: str) -> Training:
    return Training(Flows(Source(HEAD + code)))


def test_a_loop_trains_if_a_function_that_it_calls_does() -> None:
    found = training("""
def step(batch):
    model(batch).backward()
    optimizer.step()
for epoch in range(3):
    for batch in train_loader:
        step(batch)
    for batch in test_loader:
        model(batch)
""")
    assert len(found.loops) == len(found.other_loops) == 1
    assert [found.source.code(site.call) for site in found.divided] == ["DataLoader([], 2, shuffle=True)"]
    assert found.epoch(found.loops[0]) == "epoch"
    assert found.passes_are_counted()


@pytest.mark.parametrize(
    "body",
    [
        "loss.backward()\n    if i % 4 == 0:\n        optimizer.step()",
        "last = (i + 1) % 4 == 0\n    loss.backward()\n    if last:\n        optimizer.step()",
        "loss.backward()\n    other.backward()\n    optimizer.step()",
        "for part in range(2):\n        loss.backward()\n    optimizer.step()",
    ],
)
def test_several_backward_passes_before_a_step_are_noticed(body: str) -> None:
    assert not training(f"for i, loss in enumerate(train_loader):\n    {body}\n").passes_are_counted()


@pytest.mark.parametrize(
    "body",
    [
        "loss.backward()\n    optimizer.step()\n    if i % 10 == 0:\n        print(i)",
        "if amp:\n        scaler.scale(loss).backward()\n    else:\n        loss.backward()\n    optimizer.step()",
        "if fine:\n        loss.backward()\n        optimizer.step()",
    ],
)
def test_one_backward_pass_before_each_step_is_counted(body: str) -> None:
    assert training(f"for i, loss in enumerate(train_loader):\n    {body}\n").passes_are_counted()


def test_batches_that_next_draws_in_a_loop_that_trains_are_read_there() -> None:
    found = training("""
batches = iter(train_loader)
while True:
    model(next(batches)).backward()
    optimizer.step()
""")
    assert len(found.reads) == len(found.divided) == 1


MEAN, SUM = Value(over=Over.MEAN), Value(over=Over.SUM)


@pytest.mark.parametrize(
    ("left", "operator", "right", "over"),
    [
        (MEAN, cst.Add(), MEAN, Over.MEAN),
        (MEAN, cst.Add(), ALL, Over.MEAN),
        (SUM, cst.Add(), ALL, Over.UNKNOWN),
        (SUM, cst.Subtract(), SUM, Over.SUM),
        (MEAN, cst.Multiply(), COUNT, Over.SUM),
        (ALL, cst.Multiply(), MEAN, Over.MEAN),
        (MEAN, cst.Multiply(), MEAN, Over.UNKNOWN),
        (SUM, cst.Divide(), ALL, Over.SUM),
        (SUM, cst.Divide(), COUNT, Over.MEAN),
        (ALL, cst.Divide(), SUM, Over.UNKNOWN),
        (MEAN, cst.Power(), ALL, Over.UNKNOWN),
        (ALL, cst.Add(), ALL, Over.ALL),
    ],
)
def test_arithmetic_keeps_means_and_sums_apart(
    left: Value, operator: cst.BaseBinaryOp, right: Value, over: Over
) -> None:
    assert combined(operator, left, right).over is over


def test_what_is_one_or_another_is_known_where_they_agree() -> None:
    assert either(MEAN, ALL) == MEAN
    assert either(MEAN, SUM).over is Over.UNKNOWN
    assert all_alike([ALL, MEAN, MEAN]).over is Over.MEAN
    assert all_alike([MEAN, OWN]).over is Over.UNKNOWN
    pair = either(Value(items=(MEAN, ALL)), Value(items=(MEAN, SUM)))
    assert pair.items == (MEAN, SUM)
    assert pair.own


def test_a_count_in_a_list_is_a_number_like_others() -> None:
    assert collected(Value(items=(COUNT,))).items[0].over is Over.SUM


COMMENTED = """\
# a comment
x = 1  # one

if x:
    save(x)
"""


def test_changes_are_made_and_the_rest_of_the_text_stays() -> None:
    source = Source(COMMENTED)
    edits = Edits(source)
    call = next(source.all(cst.Call))
    edits.wrap(call.args[0].value, "twice")
    edits.wrap(call.args[0].value, "twice")
    edits.put_into(source.statement(call), "if first")
    edits.before(source.statement(call), "begin()", "begin()")
    edits.after(next(source.all(cst.SimpleStatementLine)), "y = 2")
    assert edits.changes_in(call)
    assert (
        edits.applied(source.module)
        == """\
# a comment
x = 1  # one
y = 2

if x:
    begin()
    if first:
        save(twice(x))
"""
    )


def test_a_statement_can_go_and_a_name_stand_in_a_call() -> None:
    source = Source("a = 1\nfor i in f(b):\n    pass\n")
    edits = Edits(source)
    edits.remove(next(source.all(cst.SimpleStatementLine)))
    edits.wrap(next(source.all(cst.Call)), "map(g, _)")
    assert edits.applied(source.module) == "for i in map(g, f(b)):\n    pass\n"


def test_notes_come_once() -> None:
    edits = Edits(Source(COMMENTED))
    edits.note(0, "so")
    edits.note(0, "so")
    edits.refuse(3, "no")
    assert (edits.notes, edits.obstacles) == ([(0, "so")], [(3, "no")])
