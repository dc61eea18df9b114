"""Gradients accumulated and clipped, bfloat16 by autocast, groups with and without decay, a warm-up by LambdaLR."""

import math

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

BLOCK, VOCAB, WIDTH = 16, 40, 32
BATCH_SIZE = 8
GRAD_ACCUM_STEPS = 4
MAX_NORM = 1.0


class Blocks(Dataset):
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return (len(self.tokens) - 1) // BLOCK

    def __getitem__(self, idx):
        chunk = self.tokens[idx * BLOCK : (idx + 1) * BLOCK + 1]
        return chunk[:-1], chunk[1:]


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.zeros(BLOCK, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, labels=None):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        logits = self.head(self.encoder(self.embed(ids) + self.position, mask=mask, is_causal=True))
        if labels is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.reshape(-1))


def make_tokens(n):
    generator = torch.Generator().manual_seed(3)
    steps = torch.randint(1, 4, (n,), generator=generator)
    return torch.cumsum(steps, 0) % VOCAB


def configure(model, lr):
    decay, no_decay = [], []
    for name, param in model.named_parameters():
        (decay if param.dim() >= 2 else no_decay).append(param)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def main():
    torch.manual_seed(1337)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    tokens = make_tokens(BLOCK * 132)
    train_data, val_data = Blocks(tokens[: BLOCK * 112]), Blocks(tokens[BLOCK * 112 :])
    train_loader = DataLoader(train_data, shuffle=True, batch_size=BATCH_SIZE, drop_last=True)
    val_loader = DataLoader(val_data, shuffle=False, batch_size=BATCH_SIZE)

    model = TinyLM().to(device)
    optimizer = configure(model, lr=2e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))

    global_step = 0
    for epoch in range(1, 4):
        model.train()
        optimizer.zero_grad()
        for step, (ids, labels) in enumerate(train_loader):
            ids, labels = ids.to(device), labels.to(device)
            with torch.autocast(device_type=device.type, dtype=torch.bfloat16):
                _, loss = model(ids, labels)
                loss = loss / GRAD_ACCUM_STEPS
            loss.backward()
            if (step + 1) % GRAD_ACCUM_STEPS == 0 or (step + 1) == len(train_loader):
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                global_step += 1
                if global_step % 2 == 0:
                    print(f"step {global_step} loss {loss.item() * GRAD_ACCUM_STEPS:.6f} norm {grad_norm:.6f}")

        model.eval()
        losses = torch.zeros(len(val_loader))
        with torch.no_grad():
            for k, (ids, labels) in enumerate(val_loader):
                losses[k] = model(ids.to(device), labels.to(device))[1].item()
        val_loss = losses.mean().item()
        print(f"epoch {epoch} val loss {val_loss:.6f} perplexity {math.exp(val_loss):.5f}")


if __name__ == "__main__":
    main()
