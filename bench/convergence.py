"""The accuracy cost of compressed and of less frequent communication: final losses of real training, compared with
plain sums.

    python -m bench.convergence [--quick] [--check] [--save] [--ranks 2]

Three tasks use data from installed packages: scikit-learn's handwritten digits (a perceptron), characters of Python's
documentation (a language model with a context of 16), and pairs of neighbouring words of the same text (a recommender:
two embeddings whose product predicts the next word). Each task is trained from three seeds by each method, with the
same batches, number of steps and learning rates. No hyperparameter is tuned for a method. Ranks use Gloo, because
traffic through shared memory is not compressed.

Bar: the validation loss, averaged over the seeds, divided by the validation loss of plain sums.
"""

from __future__ import annotations

import contextlib
import pydoc_data.topics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
from torch import nn

from bench.lib.harness import Report, finish, parser
from bench.lib.ranks import run_ranks, start

LIMITS = {
    "int8": 1.02,
    "fp8": 1.02,
    "topk 0.05": 1.10,
    "powersgd 4": 1.10,
    "local sgd 8": 1.10,
    "diloco 16": 1.10,
    "diloco 16, 4 fragments": 1.10,
}
PAPERS = "diloco 16, the paper's momentum"
"""Method without a bar: the paper's setting needs many more outer steps than these tasks have."""

PLAIN, CONTEXT, SEEDS = "plain", 16, 3

Task = tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]
"""A task: a model, training inputs and targets, validation inputs and targets, and a number of steps."""


def digits() -> Task:
    """Return the task of classifying scikit-learn's 1 797 digits of 8 × 8 pixels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs, targets = torch.tensor(found.data, dtype=torch.float32) / 16.0, torch.tensor(found.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, targets = inputs[order], targets[order]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, inputs[:1400], targets[:1400], inputs[1400:], targets[1400:], 320


def text() -> str:
    """Return the text of Python's documentation, as in its `help()`."""
    return "".join(pydoc_data.topics.topics.values())


def characters() -> Task:
    """Return the task of predicting the next character of a text."""
    codes = torch.tensor([min(ord(letter), 127) for letter in text()])
    windows = codes.unfold(0, CONTEXT + 1, 5)
    inputs, targets = windows[:, :-1], windows[:, -1]
    model = nn.Sequential(
        nn.Embedding(128, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 192), nn.ReLU(), nn.Linear(192, 128)
    )
    split = len(inputs) * 9 // 10
    return model, inputs[:split], targets[:split], inputs[split:], targets[split:], 640


class Recommender(nn.Module):
    """A model that predicts the next word."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(words, 32), nn.Embedding(words, 32)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores of all words for each previous word."""
        scores: torch.Tensor = self.users(inputs) @ self.items.weight.T
        return scores


def recommender() -> Task:
    """Return the task of predicting the next word among the thousand most frequent ones."""
    words = text().lower().split()
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(1000))}
    pairs = [(known[a], known[b]) for a, b in pairwise(words) if a in known and b in known]
    table = torch.tensor(pairs)[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
    split = len(table) * 9 // 10
    return Recommender(1000), *table[:split].T, *table[split:].T, 640  # type: ignore[return-value]  # pairs of columns


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "characters": characters, "recommender": recommender}


def validation_loss(make: Callable[[], Task], way: str, seed: int, shorter: int) -> float:
    """Train a task with a method and return the validation loss. Collective."""
    import sirtaki.torch as hvd

    torch.manual_seed(seed)
    model, inputs, targets, held_inputs, held_targets, steps = make()
    inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    hvd.broadcast_parameters(model.state_dict(), 0)
    kind, _, how = way.partition(" ")
    context: Any = contextlib.nullcontext()
    if kind == "local":
        context = hvd.LocalSGD(model, inner, sync_every=8)
    elif kind == "diloco":
        fragments = 4 if "fragments" in how else 1
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True) if way == PAPERS else None
        context = hvd.DiLoCo(
            model, inner, sync_every=16, outer=outer, fragments=fragments, delay=2 if fragments > 1 else 0, blend=0.0
        )
    else:
        compression: Any = getattr(hvd.Compression, "none" if kind == PLAIN else kind)
        if how:
            compression = compression(float(how) if "." in how else int(how))
        inner = hvd.DistributedOptimizer(inner, model.named_parameters(), compression)
    generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    with context:
        for _ in range(steps // shorter):
            chosen = torch.randint(len(inputs), (32,), generator=generator)
            inner.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            inner.step()
    if hasattr(inner, "close"):
        inner.close()
    with torch.no_grad():
        parts = zip(held_inputs.split(4096), held_targets.split(4096), strict=True)
        total = sum(float(nn.functional.cross_entropy(model(x), y, reduction="sum")) for x, y in parts)
    return total / len(held_targets)


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: train all tasks by all methods from all seeds, and return the losses. Collective."""
    return {
        task: {
            way: [validation_loss(make, way, seed, options["shorter"]) for seed in range(options["seeds"])]
            for way in (PLAIN, *LIMITS, PAPERS)
        }
        for task, make in TASKS.items()
    }


def main() -> int:
    """Train every task by every method, and compare the losses."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2)
    args = flags.parse_args()
    report = Report(name="convergence")
    options = {"seeds": 1 if args.quick else SEEDS, "shorter": 8 if args.quick else 1}
    env = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0", "SIRTAKI_TRANSPORT": "gloo"}
    losses = run_ranks("bench.convergence", args.ranks, options, env=env, timeout_s=2400.0)
    for task, ways in losses.items():
        plain = mean(ways[PLAIN])
        for way, found in ways.items():
            ratio = mean(found) / plain
            report.rows.append(
                {
                    "task": task,
                    "way": way,
                    "loss": mean(found),
                    "smallest": min(found),
                    "largest": max(found),
                    "of_plain": ratio,
                    "losses": found,
                }
            )
            if way in LIMITS and not args.quick:
                report.bar(f"{task}, {way}: loss / plain", ratio, LIMITS[way])
    if args.quick:
        report.notes.append("one seed and an eighth of the steps: too few to judge by")
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
