"""A GradScaler, micro-batches in an inner loop, next() on an endless iterator, an average of weights."""

import copy
import itertools

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        a = torch.tensor(i / self.n * 6.28)
        return torch.stack([a.sin(), (2 * a).cos()]), (a.cos() > 0).long()


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


class EMA:
    def __init__(self, model, decay=0.95):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p, alpha=1 - self.decay)


torch.manual_seed(21)
device = "cuda" if torch.cuda.is_available() else "cpu"
use_amp = device == "cuda"
gradient_accumulate_every, train_steps = 2, 24
train_loader = DataLoader(Points(192), batch_size=16, shuffle=True, drop_last=True)
dl = cycle(train_loader)
model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
ema = EMA(model)
opt = torch.optim.Adam(model.parameters(), lr=2e-2, betas=(0.9, 0.99))
scaler = torch.amp.GradScaler(device, enabled=use_amp)

step = 0
losses = []
while step < train_steps:
    total_loss = 0.0
    for _ in range(gradient_accumulate_every):
        x, y = next(dl)
        x, y = x.to(device), y.to(device)
        with torch.autocast(device, enabled=use_amp):
            loss = nn.functional.cross_entropy(model(x), y)
            loss = loss / gradient_accumulate_every
            total_loss += loss.item()
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    ema.update(model)
    losses.append(total_loss)
    step += 1
    if step % 6 == 0:
        print(f"step {step}: loss {total_loss:.7f}")

data = Points(192)
inputs = torch.stack([data[i][0] for i in range(len(data))]).to(device)
labels = torch.stack([data[i][1] for i in range(len(data))])
with torch.no_grad():
    right = (ema.shadow(inputs).argmax(1).cpu() == labels).float().mean().item()
print("ema accuracy %.4f, mean loss %.6f" % (right, sum(losses) / len(losses)))
torch.save({"ema": ema.shadow.state_dict(), "opt": opt.state_dict(), "step": step}, "ema.ckpt")
