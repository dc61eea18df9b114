"""Scikit-learn's digits with Hugging Face Accelerate, over Sirtaki.

sirtakirun -np 2 python examples/accelerate_digits.py
torchrun --nproc-per-node 2 examples/accelerate_digits.py
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

flags = argparse.ArgumentParser()
flags.add_argument("--epochs", type=int, default=10)
flags.add_argument("--save", help="folder for the state after the last epoch")
flags.add_argument("--resume", help="folder with a saved state")
flags.add_argument("--precision", default="no", choices=["no", "bf16"])
flags.add_argument("--backend", default="sirtaki")
args = flags.parse_args()

dist.init_process_group(args.backend, init_method="sirtaki://")  # Accelerate uses an existing process group
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(), mixed_precision=args.precision, gradient_accumulation_steps=2
)

torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = 0
if args.resume:
    accelerator.load_state(args.resume)
    first = int(torch.load(f"{args.resume}/epoch.pt"))

for epoch in range(first, args.epochs):
    loader.set_epoch(epoch)
    for images, labels in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean_loss = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"epoch {epoch + 1}: loss {mean_loss.item():.4f}", flush=True)

if args.save:
    accelerator.save_state(args.save)
    if accelerator.is_main_process:
        torch.save(torch.tensor(args.epochs), f"{args.save}/epoch.pt")
accelerator.end_training()
