import libcst as cst

from sirtaki.translate.source import Flows, Kind, Source

SCRIPT = """
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
    flows = Flows(Source(SCRIPT))
    assert held(flows, "first") == ["DataLoader(data, 2)"]
    assert held(flows, "second") == ["DataLoader(data, 3)"]
    assert held(flows, "endless") == ["DataLoader(data, 3)"]
    assert held(flows, "either") == ["DataLoader(data, 2)", "DataLoader(data, 3)"]
    assert len(flows.relays) == 1
    (loop,) = [loop for loop in flows.source.all(cst.For) if id(loop) not in flows.relays]
    assert [flows.source.code(site.call) for site in flows.holds(loop.iter, Kind.LOADER)] == ["DataLoader(data, 2)"]


def test_a_call_is_followed_to_the_function_that_it_enters() -> None:
    flows = Flows(Source(SCRIPT))
    entered = {
        flows.source.code(call.func): [flows.source.name_of(function) for function in flows.callees(call)]
        for call in flows.source.all(cst.Call)
    }
    assert entered["loaders"] == ["loaders"]
    assert entered["Trainer"] == ["Trainer.__init__"]
    assert entered["DataLoader"] == []
