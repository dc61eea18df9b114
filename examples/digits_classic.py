"""The usual Horovod example for MNIST, adapted to scikit-learn's digits, which need no download.

    sirtakirun -np 2 python examples/digits_classic.py --epochs 10

It has the usual parts of a training script: a DataLoader with a DistributedSampler, a learning rate that is scaled with
the number of ranks and warmed up, gradient clipping, a checkpoint that rank 0 writes and all ranks resume from, and
metrics averaged over the ranks.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sirtaki.torch as hvd


class Net(nn.Module):
    def __init__(self, *, sync_batch_norm: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 3, padding=1), nn.Conv2d(10, 20, 3)
        self.norm = hvd.SyncBatchNorm(20) if sync_batch_norm else nn.BatchNorm2d(20)
        self.dropout = nn.Dropout(0.2)
        self.fc1, self.fc2 = nn.Linear(180, 50), nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.conv1(images))
        hidden = nn.functional.max_pool2d(torch.relu(self.norm(self.conv2(hidden))), 2)
        hidden = torch.relu(self.fc1(hidden.flatten(1)))
        return self.fc2(self.dropout(hidden))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--warmup-epochs", type=float, default=2.0)
    parser.add_argument("--clip", type=float, default=5.0, help="largest norm of the gradients")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--bf16-allreduce", action="store_true", help="send gradients as bfloat16")
    parser.add_argument("--sync-batch-norm", action="store_true", help="normalise over the batches of all ranks")
    parser.add_argument("--use-adasum", action="store_true", help="combine updates by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--checkpoint", type=Path, default=None, help="file to resume from and to write")
    return parser.parse_args()


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    made = []
    for part, shuffle in ((shuffled[:1437], True), (shuffled[1437:], False)):
        dataset = TensorDataset(images[part], torch.tensor(digits.target)[part])
        sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle)
        made.append(DataLoader(dataset, batch_size=batch_size, sampler=sampler))
    return made[0], made[1]


def average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, clip: float | None) -> float:
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        if clip is None:
            optimizer.step()
        else:
            # Wait for the reduced gradients first, because clipping needs their norm.
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        total += loss.item()
    return average(total / len(loader), "loss")


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += int((model(images).argmax(1) == labels).sum())
    return average(correct / len(loader.sampler), "accuracy")


def main() -> None:
    args = parse()
    hvd.init()
    torch.manual_seed(args.seed)
    train_loader, test_loader = loaders(args.batch_size)

    model = Net(sync_batch_norm=args.sync_batch_norm)
    scale = 1 if args.use_adasum else hvd.size()  # Adasum needs no larger learning rate
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)
    first_epoch = 0
    if args.checkpoint is not None and args.checkpoint.exists() and hvd.rank() == 0:
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"] + 1
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    compression = hvd.Compression.none
    if args.fp16_allreduce:
        compression = hvd.Compression.fp16
    elif args.bf16_allreduce:
        compression = hvd.Compression.bf16
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    clip = None if args.use_adasum else args.clip  # Adasum combines updates, so there are no reduced gradients to clip

    def warmup(epoch: int) -> float:
        progress = min(1.0, (first_epoch + epoch + 1) / max(args.warmup_epochs, 1e-9))
        return progress + (1 - progress) / hvd.size()

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
    for epoch in range(first_epoch, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        loss = train(model, optimizer, train_loader, clip)
        scheduler.step()
        right = accuracy(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {100 * right:.1f} %", flush=True)
            if args.checkpoint is not None:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(states, args.checkpoint)


if __name__ == "__main__":
    main()
