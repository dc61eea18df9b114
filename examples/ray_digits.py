"""Scikit-learn's digits on Ray: two ranks, each an actor that calls a function.

python examples/ray_digits.py
python examples/ray_digits.py --workers 2 --min-workers 1 --max-workers 4
"""

import argparse

import ray

from sirtaki.ray import RayExecutor


def train(epochs: int, batch_size: int) -> float:
    """Train on each rank. The executor returns the results by rank."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import sirtaki.torch as hvd
    from sirtaki.ray import ray_logger

    hvd.init()
    torch.manual_seed(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16.0, torch.tensor(digits.target)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(images)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run  # with a fixed set of ranks it only calls the function
    def loop(state: hvd.elastic.TorchState) -> None:
        while state.epoch < epochs:
            data = torch.utils.data.TensorDataset(images, labels)
            loader = torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=state.sampler)
            for batch, (batch_images, batch_labels) in enumerate(loader):
                state.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(state.model(batch_images), batch_labels)
                loss.backward()
                state.optimizer.step()
                state.sampler.record_batch(batch, batch_size)
                state.commit()
            if len(loader):
                ray_logger.log(f"epoch {state.epoch + 1}: loss {hvd.allreduce(loss.detach(), name='loss'):.4f}")
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    loop(state)
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-workers", type=int, help="make the job elastic, with at least this many ranks")
    parser.add_argument("--max-workers", type=int)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--address", help="address of a Ray cluster; without it Ray is started here")
    options = parser.parse_args()
    here = {"address": "local", "num_cpus": 4, "include_dashboard": False}
    ray.init(**({"address": options.address} if options.address else here))
    executor = RayExecutor(
        RayExecutor.create_settings(),
        num_workers=options.workers,
        min_workers=options.min_workers,
        max_workers=options.max_workers,
    )
    executor.start()
    accuracies = executor.run(train, kwargs={"epochs": options.epochs, "batch_size": 32}, callbacks=[print])
    print(f"{len(accuracies)} ranks, accuracy {100 * accuracies[0]:.1f} %")
    executor.shutdown()


if __name__ == "__main__":
    main()
