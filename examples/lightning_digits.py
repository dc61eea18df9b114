"""Scikit-learn's digits with Lightning's command line, over Sirtaki.

sirtakirun -np 2 python examples/lightning_digits.py fit
"""

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sirtaki.lightning  # noqa: F401  (registers the strategies "sirtaki" and "sirtaki_tuned")


class Digits(lightning.LightningModule):
    """A small network."""

    def __init__(self, width: int = 256, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate, momentum=0.9)


class DigitsData(lightning.LightningDataModule):
    """The digits. Lightning divides the data among the ranks."""

    def train_dataloader(self) -> DataLoader:
        digits = load_digits()
        images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
        return DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, drop_last=True)


class PrintLoss(lightning.Callback):
    """A callback that prints one line per epoch on rank 0."""

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        loss = trainer.callback_metrics["loss"].item()
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch + 1}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    LightningCLI(
        Digits,
        DigitsData,
        seed_everything_default=0,
        save_config_callback=None,
        trainer_defaults={
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "sirtaki",
            "max_epochs": 10,
            "gradient_clip_val": 1.0,
            "logger": False,
            "enable_progress_bar": False,
            "callbacks": [PrintLoss()],
        },
    )
