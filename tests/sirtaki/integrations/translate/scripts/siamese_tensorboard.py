"""Triplets, a loss class of its own, metrics in a dictionary, a writer, torch.compile left out, type hints, pathlib."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class SummaryWriter:
    """Writes scalars as lines; stands for TensorBoard's."""

    def __init__(self, log_dir: str) -> None:
        self.path = Path(log_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        self.file = (self.path / "events.txt").open("w")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.file.write(f"{step} {tag} {value:.6f}\n")

    def close(self) -> None:
        self.file.close()


class Triplets(Dataset):
    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(5, 4, generator=g) * 2
        self.labels = torch.randint(0, 5, (n,), generator=g)
        self.points = self.centres[self.labels] + torch.randn(n, 4, generator=g)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        same = (self.labels == self.labels[i]).nonzero().flatten()
        other = (self.labels != self.labels[i]).nonzero().flatten()
        return self.points[i], self.points[same[i % len(same)]], self.points[other[i % len(other)]]


class ContrastiveLoss(nn.Module):
    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        d_pos = (anchor - positive).pow(2).sum(1)
        d_neg = (anchor - negative).pow(2).sum(1)
        losses = nn.functional.relu(d_pos - d_neg + self.margin)
        return losses.mean(), {"pos": d_pos.mean(), "neg": d_neg.mean(), "active": (losses > 0).float().mean()}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 16), nn.Linear(16, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Experiment:
    def __init__(self, run_dir: Path) -> None:
        torch.manual_seed(123)
        self.run_dir = run_dir
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = Encoder().to(self.device)
        self.criterion = ContrastiveLoss()
        self.opt = torch.optim.NAdam(self.model.parameters(), lr=5e-3)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=1e-2, total_steps=3 * 10)
        self.writer = SummaryWriter(str(run_dir / "tb"))
        self.global_step = 0

    def batches(self, loader: DataLoader) -> Iterator[tuple[Tensor, ...]]:
        for batch in loader:
            yield tuple(t.to(self.device) for t in batch)

    def train_epoch(self, loader: DataLoader) -> dict[str, float]:
        metrics: dict[str, list[float]] = defaultdict(list)
        self.model.train()
        for anchor, positive, negative in self.batches(loader):
            loss, parts = self.criterion(self.model(anchor), self.model(positive), self.model(negative))
            if not math.isfinite(loss.item()):
                raise RuntimeError("diverged")
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.sched.step()
            metrics["loss"].append(loss.item())
            for name, value in parts.items():
                metrics[name].append(value.item())
            self.writer.add_scalar("train/loss", loss.item(), self.global_step)
            self.global_step += 1
        return {name: sum(values) / len(values) for name, values in metrics.items()}

    def run(self, epochs: int) -> None:
        loader = DataLoader(Triplets(160, 0), batch_size=16, shuffle=True)
        best = math.inf
        for epoch in range(epochs):
            stats = self.train_epoch(loader)
            print(epoch, " ".join(f"{k}={v:.6f}" for k, v in stats.items()))
            if stats["loss"] < best:
                best = stats["loss"]
                torch.save(self.model.state_dict(), self.run_dir / "best.pt")
        self.writer.close()


if __name__ == "__main__":
    Experiment(Path("runs")).run(epochs=3)
