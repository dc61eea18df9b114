"""Digits under Lightning's ModelParallelStrategy, attached or not. Started by test_fsdp.py."""

import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from sirtaki.torch import fsdp


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.first, self.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)
        if "attach" in sys.argv:
            fsdp.attach(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(images).relu()).relu())

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"].item()
            print(f"epoch {self.trainer.current_epoch + 1}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    lightning.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True, drop_last=True))
    assert bool(fsdp.describe(model)) == ("attach" in sys.argv)
