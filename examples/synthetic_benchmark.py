"""Measure samples per second on random data, with the options of the usual Horovod benchmark.

    sirtakirun -np 2 python examples/synthetic_benchmark.py --model conv --fp16-allreduce

The first batches warm up the machine, and Sirtaki's tuner runs in them.
"""

import argparse
import statistics
import timeit

import torch
from torch import nn

import sirtaki.torch as hvd


def perceptron() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [module for _ in range(4) for module in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), (1024,)


def convolutional() -> tuple[nn.Module, tuple[int, ...]]:
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128, 256):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 4, 512), nn.ReLU(), nn.Linear(512, 10)), (3, 32, 32)


class TransformerClassifier(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(tokens).mean(1))


MODELS = {"mlp": perceptron, "conv": convolutional, "transformer": lambda: (TransformerClassifier(), (16, 128))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine updates by Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    hvd.init()
    on_gpu = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model, shape = MODELS[args.model]()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 if args.use_adasum else hvd.size()))
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(args.batch_size, *shape, device=device)
    target = torch.randint(10, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()

    def say(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    count = sum(param.numel() for param in model.parameters())
    say(f"Model: {args.model}, {count / 1e6:.1f} million parameters; batch size: {args.batch_size}")
    kind = "GPU" if on_gpu else "CPU"
    timeit.timeit(step, number=args.num_warmup_batches)
    rates = []
    for number in range(args.num_iters):
        span_s = timeit.timeit(step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / span_s)
        say(f"Iter #{number}: {rates[-1]:.1f} samples/s per {kind}")
    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    say(f"Samples/s per {kind}: {mean:.1f} +-{spread:.1f}")
    say(f"Total samples/s on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
