"""A character model that draws its batches at random, estimates its loss now and then, and has no loader."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

batch_size = 16
block_size = 8
max_iters = 40
eval_interval = 10
learning_rate = 1e-2
device = "cuda" if torch.cuda.is_available() else "cpu"
eval_iters = 4
n_embd = 16
grad_clip = 1.0

torch.manual_seed(1337)
text = "the quick brown fox jumps over the lazy dog, and runs away from the other dogs. " * 20
chars = sorted(list(set(text)))
vocab_size = len(chars)
stoi = {ch: i for i, ch in enumerate(chars)}
encode = lambda s: [stoi[c] for c in s]
data = torch.tensor(encode(text), dtype=torch.long)
n = int(0.9 * len(data))
train_data = data[:n]
val_data = data[n:]


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + block_size + 1] for i in ix])
    x, y = x.to(device), y.to(device)
    return x, y


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(vocab_size, n_embd)
        self.mix = nn.Linear(n_embd, n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets=None):
        h = self.table(idx)
        h = h + torch.tanh(self.mix(h)).cumsum(dim=1) / block_size
        logits = self.lm_head(h)
        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape
            logits = logits.view(B * T, C)
            targets = targets.view(B * T)
            loss = F.cross_entropy(logits, targets)
        return logits, loss


def get_lr(it):
    if it < 5:
        return learning_rate * (it + 1) / 5
    ratio = (it - 5) / (max_iters - 5)
    return 0.1 * learning_rate + 0.45 * learning_rate * (1 + math.cos(math.pi * ratio))


model = Bigram()
m = model.to(device)
print(sum(p.numel() for p in m.parameters()), "parameters")
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

for iter in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter)
    if iter % eval_interval == 0 or iter == max_iters - 1:
        losses = estimate_loss()
        print(f"step {iter}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}")
    xb, yb = get_batch("train")
    logits, loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
