"""A script in the style of Horovod's elastic examples: state is committed, restored, and broadcast to new ranks.

sirtakirun -np 2 python examples/elastic_digits.py
sirtakirun -np 2 --min-np 1 --max-np 4 python examples/elastic_digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import sirtaki.torch as hvd

EPOCHS, BATCH_SIZE, BATCHES_PER_COMMIT = 6, 32, 5


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, images: torch.Tensor, labels: torch.Tensor) -> None:
    while state.epoch < EPOCHS:
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(images, labels), batch_size=BATCH_SIZE, sampler=state.sampler
        )
        total_loss = torch.zeros(())
        # The sampler divides the rest of the epoch, so batches count from 0 also after a restore.
        for batch, (batch_images, batch_labels) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(state.model(batch_images), batch_labels)
            loss.backward()
            state.optimizer.step()
            total_loss += loss.detach()
            state.sampler.record_batch(batch, BATCH_SIZE)
            if (batch + 1) % BATCHES_PER_COMMIT == 0:
                state.commit()
        if len(loader):  # empty if the epoch's last batch was committed
            mean_loss = hvd.allreduce(total_loss / len(loader), name="loss")
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1}: loss {mean_loss:.4f}", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def main() -> None:
    hvd.init()
    torch.manual_seed(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16.0, torch.tensor(digits.target)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(images)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([lambda: print(f"rank {hvd.rank()} goes on in epoch {state.epoch + 1}")])
    train(state, images, labels)
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).double().mean()
    if hvd.rank() == 0:
        print(f"accuracy: {100 * correct:.1f} %", flush=True)


if __name__ == "__main__":
    main()
