"""A small language model under PyTorch's fully_shard. Sirtaki gathers and scatters the shards.

torchrun --nproc-per-node 2 examples/fsdp_transformer.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from sirtaki.torch import fsdp


class Transformer(nn.Module):
    """A transformer that predicts each next byte."""

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits `(batch * length, 256)`."""
        hidden = self.tokens(text)
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))  # its output is not a view; FSDP2 warns about views


def main() -> None:
    """Train the model to memorise a sentence."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    fsdp.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor([list(b"Zorba teaches the boss to dance the sirtaki on the beach.")])
    for step in range(150):
        optimizer.zero_grad()
        scores = model(text[:, :-1])
        loss = nn.functional.cross_entropy(scores, text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
