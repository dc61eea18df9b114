"""Short training scripts around the lines under test."""

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
    """Return the lines that a translation adds, in addition to the lines that every translation adds.

    Args:
        in_loop: additional lines in the loop over batches.
        behind: lines after this loop, in the loop over epochs.
        before: lines before the script.
    """

    def indented(code: str, by: int) -> str:
        return "".join(" " * by + line + "\n" for line in code.splitlines())

    bare, whole = HEAD, before + HEAD + indented(in_loop, 8) + indented(behind, 4)
    usual = set(translate(bare).after.splitlines())
    lines = whole.splitlines()
    new = [line for line in translate(whole).after.splitlines() if line not in lines]
    return [line.strip() for line in new if line not in usual]
