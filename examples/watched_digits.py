"""Scikit-learn's digits, logged to TensorBoard, Weights & Biases and MLflow, if they are installed.

sirtakirun -np 2 python examples/watched_digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sirtaki.torch as hvd
from sirtaki import watch
from sirtaki.errors import ConfigError


class WandbWatcher(watch.Watcher):
    def __init__(self, run):
        self.run = run

    def iteration(self, event):
        self.run.log({"sirtaki/step_s": event.step_s, "sirtaki/communication_s": event.communication_s})

    def decision(self, event):
        self.run.summary["sirtaki/setting"] = event.setting

    def close(self):
        self.run.finish()


class MlflowWatcher(watch.Watcher):
    def __init__(self, mlflow):
        self.mlflow = mlflow

    def iteration(self, event):
        self.mlflow.log_metric("sirtaki.communication_s", event.communication_s, step=event.number)

    def decision(self, event):
        self.mlflow.set_tag("sirtaki.setting", event.setting)

    def close(self):
        self.mlflow.end_run()


def add_watchers():
    try:
        watch.add(watch.TensorBoard("runs"))
    except ConfigError:
        print("without TensorBoard", flush=True)
    try:
        import wandb

        watch.add(WandbWatcher(wandb.init(project="digits")))
    except ImportError:
        print("without Weights & Biases", flush=True)
    try:
        import mlflow

        mlflow.start_run()
        watch.add(MlflowWatcher(mlflow))
    except ImportError:
        print("without MLflow", flush=True)


hvd.init()
if hvd.rank() == 0:
    add_watchers()
torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    mean_loss = hvd.allreduce(loss.detach())
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {mean_loss.item():.4f}", flush=True)
