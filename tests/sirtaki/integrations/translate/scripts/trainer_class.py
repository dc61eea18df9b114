"""A class that trains, resumes from its checkpoint and logs."""

import logging
import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger(__name__)


@dataclass
class Config:
    lr: float = 3e-3
    batch_size: int = 24
    epochs: int = 4
    snapshot: str = "snapshot.pt"
    save_every: int = 2


class Waves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 2, generator=g) * 6 - 3
        self.y = torch.sin(self.x[:, :1]) * torch.cos(self.x[:, 1:])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


class Trainer:
    def __init__(self, model, train_data, val_data, config):
        self.config = config
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.loader = DataLoader(train_data, batch_size=config.batch_size, shuffle=True, num_workers=0)
        self.val_loader = DataLoader(val_data, batch_size=config.batch_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=config.epochs)
        self.loss_fn = nn.MSELoss()
        self.history = []
        self.first_epoch = 0
        if os.path.exists(config.snapshot):
            self._load()

    def _load(self):
        snapshot = torch.load(self.config.snapshot)
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.first_epoch = snapshot["epoch"] + 1
        log.info("resumed at epoch %d", self.first_epoch)

    def _save(self, epoch):
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch},
            self.config.snapshot,
        )
        log.info("saved %s", self.config.snapshot)

    def _run_batch(self, batch):
        x, y = batch["x"].to(self.device), batch["y"].to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.model.train()
        total = 0.0
        for batch in self.loader:
            total += self._run_batch(batch)
        return total / len(self.loader)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        losses = []
        for batch in self.val_loader:
            losses.append(self.loss_fn(self.model(batch["x"].to(self.device)), batch["y"].to(self.device)).item())
        return sum(losses) / len(losses)

    def fit(self):
        for epoch in range(self.first_epoch, self.config.epochs):
            train_loss = self._run_epoch(epoch)
            val_loss = self.validate()
            self.scheduler.step()
            self.history.append((train_loss, val_loss))
            log.info("epoch %d train %.8f val %.8f", epoch, train_loss, val_loss)
            print(f"epoch {epoch}: train {train_loss!r} val {val_loss!r}")
            if epoch % self.config.save_every == 0:
                self._save(epoch)


if __name__ == "__main__":
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    Trainer(net, Waves(480, 1), Waves(96, 2), Config()).fit()
