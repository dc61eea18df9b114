"""A small language model of characters, trained on a text of this repository: its licence.

    sirtakirun -np 2 python examples/language_model.py

Each rank has its own part of the text, and the parts may differ in length. A rank that has finished its part calls
`join()` and waits for all ranks. Forward passes run in bfloat16, and gradients of several passes are accumulated.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import sirtaki.torch as hvd

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"


class CharacterModel(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        hidden = self.characters(text) + self.places(torch.arange(length))
        return self.head(self.layers(hidden, mask=self.mask[:length, :length], is_causal=True))


def batches(text: torch.Tensor, context: int, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield every window of this rank's part once, in random order."""
    windows = text.unfold(0, context + 1, context // 2)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    yield from windows[order].split(batch_size)


def continued(model: nn.Module, start: torch.Tensor, length: int, context: int) -> torch.Tensor:
    text = start
    for _ in range(length):
        with torch.no_grad():
            following = model(text[None, -context:])[0, -1].argmax()
        text = torch.cat([text, following[None]])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per rank and backward pass")
    parser.add_argument("--batches-per-step", type=int, default=1, help="backward passes accumulated per step")
    parser.add_argument("--context", type=int, default=64, help="context length in characters")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    text = " ".join(TEXT.read_text().split())
    alphabet = sorted(set(text))
    encoded = torch.tensor([alphabet.index(character) for character in text])
    # The parts differ in length on purpose; the last rank has the longest.
    weights = [10 + rank for rank in range(hvd.size())]
    start = len(encoded) * sum(weights[: hvd.rank()]) // sum(weights)
    own = encoded[start : start + len(encoded) * weights[hvd.rank()] // sum(weights)]

    model = CharacterModel(len(alphabet), args.context, args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.batches_per_step
    )
    for epoch in range(args.epochs):
        losses = []
        for number, window in enumerate(batches(own, args.context, args.batch_size, seed=epoch)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(window[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            (loss / args.batches_per_step).backward()
            losses.append(loss.item())
            if (number + 1) % args.batches_per_step == 0:
                optimizer.step()
                optimizer.zero_grad()
        if len(losses) % args.batches_per_step:  # an accumulation window that ends early
            optimizer.step()
            optimizer.zero_grad()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        mean = float(hvd.allreduce(torch.tensor(sum(losses) / len(losses)), name="loss"))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: {mean / math.log(2):.2f} bits a character", flush=True)
    if hvd.rank() == 0:
        model.eval()
        said = continued(model, encoded[:20], 60, args.context)
        print("".join(alphabet[int(index)] for index in said), flush=True)


if __name__ == "__main__":
    main()
