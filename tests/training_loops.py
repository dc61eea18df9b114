"""Training scripts in short, around the lines that a test is about."""

from sirtaki.integrations.translate import translate

HEAD = """\
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader, test = DataLoader(data, batch_size=8, shuffle=True), DataLoader(others, batch_size=8)
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""


def added(in_loop: str = "", behind: str = "", before: str = "") -> list[str]:
    """Lines that a translation brings, without those that every one brings.

    Args:
        in_loop: more of the loop over batches.
        behind: what follows it in the loop over epochs.
        before: what stands in front of the whole.
    """

    def indented(code: str, by: int) -> str:
        return "".join(" " * by + line + "\n" for line in code.splitlines())

    bare, whole = HEAD, before + HEAD + indented(in_loop, 8) + indented(behind, 4)
    usual = set(translate(bare).after.splitlines())
    lines = whole.splitlines()
    new = [line for line in translate(whole).after.splitlines() if line not in lines]
    return [line.strip() for line in new if line not in usual]
