"""Networks of a size that is common on GPUs, made of PyTorch's own modules, each with a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import nn

GpuModel = tuple[nn.Module, torch.Tensor]
"""A model and a batch for it, on one device."""


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map `(n, inputs, h, w)` to `(n, 4 * width, h / stride, w / stride)`."""
        return torch.relu(self.path(images) + self.around(images))


def resnet50_like(device: torch.device, *, batch: int = 64, pixels: int = 224) -> GpuModel:
    """Make ResNet-50: 25.6 M parameters in 161 tensors."""
    blocks: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for number in range(count):
            blocks.append(Bottleneck(inputs, width, 2 if stage and not number else 1))
            inputs = 4 * width
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    return model.to(device), torch.randn(batch, 3, pixels, pixels, device=device)


class TokenModel(nn.Module):
    """An embedding, transformer layers, and a projection onto the vocabulary. Causal (GPT-2) or not (BERT)."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, length: int, causal: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=causal
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map `(n, length)` token numbers to `(n, length, vocabulary)` logits."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device) if self.causal else None
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=self.causal)
        logits: torch.Tensor = self.head(hidden)
        return logits


def bert_base_like(device: torch.device, *, batch: int = 8) -> GpuModel:
    """Make BERT-Base's encoder with its vocabulary: 12 layers of 768, sequences of 128."""
    model = TokenModel(vocabulary=30522, width=768, layers=12, length=128, causal=False)
    return model.to(device), torch.randint(0, 30522, (batch, 128), device=device)


def gpt2_like(device: torch.device, *, batch: int = 4) -> GpuModel:
    """Make GPT-2's smallest: 12 causal layers of 768, sequences of 256."""
    model = TokenModel(vocabulary=50257, width=768, layers=12, length=256, causal=True)
    return model.to(device), torch.randint(0, 50257, (batch, 256), device=device)


def small_mlp(device: torch.device) -> GpuModel:
    """Make a network of 12 layers with tensors of 1 KiB to 256 KiB, for checks."""
    widths = [64, *[256] * 10, 16]
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers).to(device), torch.randn(16, 64, device=device)


GPU_MODELS: Mapping[str, Callable[[torch.device], GpuModel]] = {
    "resnet50-like": resnet50_like,
    "bert-base-like": bert_base_like,
    "gpt2-like": gpt2_like,
}
"""Models whose steps are timed."""


def models_for(*, dry: bool) -> Mapping[str, Callable[[torch.device], GpuModel]]:
    """Return the models whose steps are timed. They are small in a dry run."""
    if not dry:
        return GPU_MODELS
    return {"small-mlp": small_mlp, "token-model": tiny_tokens}


def tiny_tokens(device: torch.device) -> GpuModel:
    """Make a transformer that a CPU trains in milliseconds."""
    model = TokenModel(vocabulary=50, width=64, layers=1, length=8, causal=True)
    return model.to(device), torch.randint(0, 50, (2, 8), device=device)
