import pytest

from sirtaki.translate.meaning import Training
from sirtaki.translate.source import Flows, Source

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
