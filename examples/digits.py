"""An ordinary Horovod script that learns scikit-learn's digits. Only the import was changed.

    sirtakirun -np 2 python examples/digits.py

The digits are part of scikit-learn, so nothing is downloaded.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import sirtaki.torch as hvd  # was: import horovod.torch as hvd


class DigitsNet(nn.Module):
    """A convolutional net, oversized for digits: 9 million parameters, so that communication matters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 2048), nn.ReLU(),
            nn.Linear(2048, 2048), nn.ReLU(),
            nn.Linear(2048, 1024), nn.ReLU(),
            nn.Linear(1024, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    shuffled = torch.randperm(len(labels))
    train, test = shuffled[:1437], shuffled[1437:]
    dataset = torch.utils.data.TensorDataset(images[train], labels[train])
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    begin = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        total_loss = torch.zeros(())
        for batch_images, batch_labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch_images), batch_labels)
            loss.backward()
            optimizer.step()
            total_loss += loss.detach()
        mean_loss = hvd.allreduce(total_loss / len(loader), name="loss")
        if hvd.rank() == 0 and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss:.4f}, {time.perf_counter() - begin:.1f} s", flush=True)

    model.eval()
    mine = test[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        correct = (model(images[mine]).argmax(dim=1) == labels[mine]).sum().double()
    accuracy = hvd.allreduce(correct, op=hvd.Sum, name="accuracy") / len(test)
    if hvd.rank() == 0:
        print(f"accuracy on {len(test)} unseen digits: {100 * accuracy:.1f} %", flush=True)


if __name__ == "__main__":
    main()
