"""An endless-looking stream (IterableDataset), counted in steps instead of epochs, with a progress line of its own."""

import random
import sys
import time

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Noisy parabolas, one after the other."""

    def __init__(self, n, seed):
        super().__init__()
        self.n, self.seed = n, seed

    def __iter__(self):
        rng = random.Random(self.seed)
        for _ in range(self.n):
            x = rng.uniform(-1, 1)
            yield torch.tensor([x, x * x]), torch.tensor([3 * x * x - x + rng.gauss(0, 0.01)])


def progress(done, total, text):
    bar = "#" * (20 * done // total)
    sys.stdout.write(f"\r[{bar:<20}] {done}/{total} {text}")
    if done == total:
        sys.stdout.write("\n")
    sys.stdout.flush()


torch.manual_seed(11)
MAX_STEPS = 60
loader = DataLoader(Stream(n=400, seed=5), batch_size=16)
model = nn.Linear(2, 1)
opt = optim.Adam(model.parameters(), lr=0.05)
huber = nn.HuberLoss(delta=0.5)

started = time.time()
step, smoothed = 0, None
while step < MAX_STEPS:
    for features, target in loader:
        loss = huber(model(features), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        smoothed = loss.item() if smoothed is None else 0.9 * smoothed + 0.1 * loss.item()
        step += 1
        progress(step, MAX_STEPS, f"{smoothed:.7f}")
        if step >= MAX_STEPS:
            break

print("weights", [round(w, 6) for w in model.weight.flatten().tolist()])
elapsed = time.time() - started
if elapsed > 3600:
    print("that took long")
