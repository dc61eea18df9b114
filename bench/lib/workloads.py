"""Workloads of the benchmarks: gradients of well-known networks, and descriptions of clusters.

A workload is a gradient layout in the order of the backward pass, with each gradient's share of the backward time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sirtaki.autotune.model.planning import Cluster
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout

# ── networks as lists of parameters with their compute cost ──────────────────────────────────────────────────────────

MEMORY_BOUND_MACS = 32.0
"""Number of multiply-adds that take as long as a memory-bound operation on one element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter tensor in the order of the forward pass.

    Attributes:
        numel: number of elements.
        macs: multiply-adds of this tensor in the forward pass of one sample.
    """

    name: str
    numel: int
    macs: float


@dataclass(slots=True)
class _NetBuilder:
    """Collects parameters while a construction rule iterates over its layers."""

    parameters: list[Parameter] = field(default_factory=list)

    def add(self, name: str, numel: int, macs: float = 0.0) -> None:
        self.parameters.append(Parameter(name=name, numel=numel, macs=macs))

    def conv(
        self,
        name: str,
        channels_in: int,
        channels_out: int,
        kernel: tuple[int, int],
        side: int,
        *,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        """Add a convolution whose output is `side` × `side`."""
        weight = channels_out * (channels_in // groups) * kernel[0] * kernel[1]
        self.add(f"{name}.weight", weight, weight * side * side)
        if bias:
            self.add(f"{name}.bias", channels_out)

    def norm(self, name: str, channels: int, positions: int) -> None:
        """Add a normalisation of `positions` positions with `channels` features each."""
        self.add(f"{name}.weight", channels, MEMORY_BOUND_MACS * channels * positions)
        self.add(f"{name}.bias", channels)

    def conv_norm(
        self, name: str, channels_in: int, channels_out: int, kernel: int | tuple[int, int], side: int
    ) -> None:
        shape = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.conv(f"{name}.conv", channels_in, channels_out, shape, side)
        self.norm(f"{name}.bn", channels_out, side * side)

    def linear(self, name: str, features_in: int, features_out: int, *, rows: int = 1, extra_macs: float = 0) -> None:
        self.add(f"{name}.weight", features_in * features_out, features_in * features_out * rows + extra_macs)
        self.add(f"{name}.bias", features_out)


def vgg(depths: tuple[int, int, int, int, int]) -> list[Parameter]:
    """Return VGG (Simonyan & Zisserman). `depths`: number of convolutions of each block."""
    net = _NetBuilder()
    channels_in = 3
    for block, (channels, depth) in enumerate(zip((64, 128, 256, 512, 512), depths, strict=True)):
        for layer in range(depth):
            net.conv(f"features.{block}.{layer}", channels_in, channels, (3, 3), 224 >> block, bias=True)
            channels_in = channels
    net.linear("classifier.0", 512 * 7 * 7, 4096)
    net.linear("classifier.3", 4096, 4096)
    net.linear("classifier.6", 4096, 1000)
    return net.parameters


def resnet(depths: tuple[int, int, int, int]) -> list[Parameter]:
    """Return ResNet (He et al.) with bottleneck blocks. `depths`: number of blocks of each stage."""
    net = _NetBuilder()
    net.conv_norm("stem", 3, 64, 7, 112)
    channels_in = 64
    for stage, depth in enumerate(depths):
        width, side = 64 << stage, 56 >> stage
        for block in range(depth):
            name = f"layer{stage + 1}.{block}"
            reduced_at = side * 2 if block == 0 and stage > 0 else side  # The 3×3 convolution strides.
            net.conv_norm(f"{name}.1", channels_in, width, 1, reduced_at)
            net.conv_norm(f"{name}.2", width, width, 3, side)
            net.conv_norm(f"{name}.3", width, width * 4, 1, side)
            if block == 0:
                net.conv_norm(f"{name}.downsample", channels_in, width * 4, 1, side)
            channels_in = width * 4
    net.linear("fc", 2048, 1000)
    return net.parameters


def densenet(depths: tuple[int, int, int, int]) -> list[Parameter]:
    """Return DenseNet (Huang et al.), growth 32, bottleneck 4. `depths`: number of layers of each block."""
    growth, net = 32, _NetBuilder()
    net.conv_norm("stem", 3, 64, 7, 112)
    channels, side = 64, 56
    for block, depth in enumerate(depths):
        for layer in range(depth):
            name = f"block{block + 1}.{layer}"
            net.norm(f"{name}.norm1", channels, side * side)
            net.conv(f"{name}.conv1", channels, 4 * growth, (1, 1), side)
            net.norm(f"{name}.norm2", 4 * growth, side * side)
            net.conv(f"{name}.conv2", 4 * growth, growth, (3, 3), side)
            channels += growth
        if block < 3:
            net.norm(f"transition{block + 1}.norm", channels, side * side)
            net.conv(f"transition{block + 1}.conv", channels, channels // 2, (1, 1), side)
            channels, side = channels // 2, side // 2
    net.norm("norm5", channels, side * side)
    net.linear("classifier", channels, 1000)
    return net.parameters


def inception_v4() -> list[Parameter]:
    """Return Inception-v4 (Szegedy et al., figures 3 to 9), with 224 × 224 input as in the ASC-WFBP paper."""
    net = _NetBuilder()

    def branch(name: str, channels_in: int, side: int, *layers: tuple[int, int | tuple[int, int]]) -> None:
        for index, (channels, kernel) in enumerate(layers):
            net.conv_norm(f"{name}.{index}", channels_in, channels, kernel, side)
            channels_in = channels

    net.conv_norm("stem.0", 3, 32, 3, 111)
    net.conv_norm("stem.1", 32, 32, 3, 109)
    net.conv_norm("stem.2", 32, 64, 3, 109)
    net.conv_norm("stem.3", 64, 96, 3, 54)  # In parallel with a pooling: 64 + 96 = 160 channels.
    branch("stem.4a", 160, 52, (64, 1), (96, 3))
    branch("stem.4b", 160, 52, (64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3))
    net.conv_norm("stem.5", 192, 192, 3, 25)  # In parallel with a pooling: 192 + 192 = 384 channels.
    for block in range(4):
        name = f"a{block}"
        branch(f"{name}.0", 384, 25, (96, 1))
        branch(f"{name}.1", 384, 25, (64, 1), (96, 3))
        branch(f"{name}.2", 384, 25, (64, 1), (96, 3), (96, 3))
        branch(f"{name}.3", 384, 25, (96, 1))
    branch("reduction_a.0", 384, 12, (384, 3))
    branch("reduction_a.1", 384, 25, (192, 1), (224, 3))
    net.conv_norm("reduction_a.1.2", 224, 256, 3, 12)
    for block in range(7):
        name = f"b{block}"
        branch(f"{name}.0", 1024, 12, (384, 1))
        branch(f"{name}.1", 1024, 12, (192, 1), (224, (1, 7)), (256, (7, 1)))
        branch(f"{name}.2", 1024, 12, (192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7)))
        branch(f"{name}.3", 1024, 12, (128, 1))
    branch("reduction_b.0", 1024, 12, (192, 1))
    net.conv_norm("reduction_b.0.1", 192, 192, 3, 5)
    branch("reduction_b.1", 1024, 12, (256, 1), (256, (1, 7)), (320, (7, 1)))
    net.conv_norm("reduction_b.1.3", 320, 320, 3, 5)
    for block in range(3):
        name = f"c{block}"
        branch(f"{name}.0", 1536, 5, (256, 1))
        branch(f"{name}.1", 1536, 5, (384, 1))
        net.conv_norm(f"{name}.1.a", 384, 256, (1, 3), 5)
        net.conv_norm(f"{name}.1.b", 384, 256, (3, 1), 5)
        branch(f"{name}.2", 1536, 5, (384, 1), (448, (3, 1)), (512, (1, 3)))
        net.conv_norm(f"{name}.2.a", 512, 256, (1, 3), 5)
        net.conv_norm(f"{name}.2.b", 512, 256, (3, 1), 5)
        branch(f"{name}.3", 1536, 5, (256, 1))
    net.linear("classifier", 1536, 1000)
    return net.parameters


def xception() -> list[Parameter]:
    """Return Xception (Chollet, figure 5), with 299 × 299 input."""
    net = _NetBuilder()

    def separable(name: str, channels_in: int, channels_out: int, side: int) -> None:
        net.add(f"{name}.depthwise.weight", channels_in * 9, MEMORY_BOUND_MACS * channels_in * side * side)
        net.conv(f"{name}.pointwise", channels_in, channels_out, (1, 1), side)
        net.norm(f"{name}.bn", channels_out, side * side)

    net.conv_norm("conv1", 3, 32, 3, 149)
    net.conv_norm("conv2", 32, 64, 3, 147)
    channels = 64
    for block, (width, side) in enumerate(((128, 147), (256, 74), (728, 37))):
        separable(f"block{block + 1}.0", channels, width, side)
        separable(f"block{block + 1}.1", width, width, side)
        net.conv_norm(f"block{block + 1}.skip", channels, width, 1, (side + 1) // 2)
        channels = width
    for block in range(8):
        for layer in range(3):
            separable(f"block{block + 4}.{layer}", 728, 728, 19)
    separable("block12.0", 728, 728, 19)
    separable("block12.1", 728, 1024, 19)
    net.conv_norm("block12.skip", 728, 1024, 1, 10)
    separable("conv3", 1024, 1536, 10)
    separable("conv4", 1536, 2048, 10)
    net.linear("fc", 2048, 1000)
    return net.parameters


def bert(layers: int, hidden: int, *, tokens: int = 128) -> list[Parameter]:
    """Return BERT (Devlin et al.) with both pre-training heads and tied weights, as `transformers.BertForPreTraining`.

    The gradient of the tied weight is ready last, because it is complete only after the embedding's backward pass. The
    decoder's multiplications are charged to the decoder's bias.
    """
    vocabulary, net = 30522, _NetBuilder()
    touched = MEMORY_BOUND_MACS * hidden * tokens
    net.add("embeddings.word", vocabulary * hidden, touched)
    net.add("embeddings.position", 512 * hidden, touched)
    net.add("embeddings.token_type", 2 * hidden, touched)
    net.norm("embeddings.norm", hidden, tokens)
    for layer in range(layers):
        name = f"layer.{layer}"
        for part in ("query", "key", "value"):
            net.linear(f"{name}.{part}", hidden, hidden, rows=tokens)
        net.linear(f"{name}.output", hidden, hidden, rows=tokens, extra_macs=2 * tokens * tokens * hidden)
        net.norm(f"{name}.norm1", hidden, tokens)
        net.linear(f"{name}.intermediate", hidden, 4 * hidden, rows=tokens)
        net.linear(f"{name}.dense", 4 * hidden, hidden, rows=tokens)
        net.norm(f"{name}.norm2", hidden, tokens)
    net.linear("pooler", hidden, hidden)
    net.linear("heads.transform", hidden, hidden, rows=tokens)
    net.norm("heads.norm", hidden, tokens)
    net.add("heads.decoder.bias", vocabulary, vocabulary * hidden * tokens)
    net.linear("heads.next_sentence", hidden, 2)
    return net.parameters


def gpt2(*, layers: int = 12, hidden: int = 768, tokens: int = 1024) -> list[Parameter]:
    """Return GPT-2 (Radford et al.) with a tied head, as `transformers.GPT2LMHeadModel`; by default the smallest."""
    vocabulary, net = 50257, _NetBuilder()
    touched = MEMORY_BOUND_MACS * hidden * tokens
    net.add("wte", vocabulary * hidden, touched)
    net.add("wpe", 1024 * hidden, touched)
    for layer in range(layers):
        name = f"h.{layer}"
        net.norm(f"{name}.ln_1", hidden, tokens)
        net.linear(f"{name}.attn", hidden, 3 * hidden, rows=tokens)
        net.linear(f"{name}.proj", hidden, hidden, rows=tokens, extra_macs=2 * tokens * tokens * hidden)
        net.norm(f"{name}.ln_2", hidden, tokens)
        net.linear(f"{name}.fc", hidden, 4 * hidden, rows=tokens)
        net.linear(f"{name}.out", 4 * hidden, hidden, rows=tokens)
    net.add("ln_f.weight", hidden, MEMORY_BOUND_MACS * hidden * tokens)
    net.add(
        "ln_f.bias", hidden, vocabulary * hidden * tokens
    )  # Includes the head's products, which precede the layer in the backward pass.
    return net.parameters


NETWORKS: dict[str, Callable[[], list[Parameter]]] = {
    "vgg16": lambda: vgg((2, 2, 3, 3, 3)),  # Configuration D of the paper.
    "vgg19": lambda: vgg((2, 2, 4, 4, 4)),
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "resnet152": lambda: resnet((3, 8, 36, 3)),
    "densenet169": lambda: densenet((6, 12, 32, 32)),
    "densenet201": lambda: densenet((6, 12, 48, 32)),
    "inception_v4": inception_v4,
    "xception": xception,
    "bert_base": lambda: bert(12, 768),
    "bert_large": lambda: bert(24, 1024),
    "gpt2": gpt2,
    "gpt2_medium": lambda: gpt2(layers=24, hidden=1024),
}


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

GBIT = 1e9 / 8  # Bytes per second.

# Sustained multiply-adds per second of a GPU like the ASC-WFBP paper's RTX 2080 Ti, and samples per rank. With this
# rate the backward pass of ResNet-152 with 32 samples takes 0.18 s, as in section VI-E of the paper. A backward pass
# has two multiplications for each multiplication of the forward pass.
SUSTAINED_MACS_PER_S = 4.7e12
BATCH = {
    "vgg16": 32,
    "vgg19": 32,
    "resnet50": 64,
    "resnet101": 32,
    "resnet152": 32,
    "densenet169": 32,
    "densenet201": 32,
    "inception_v4": 32,
    "xception": 32,
    "bert_base": 32,
    "bert_large": 8,
    "gpt2": 4,
    "gpt2_medium": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Gradients of a network, as the synchroniser and the simulator describe them.

    Attributes:
        name: name of the network.
        layout: gradients in the order of the backward pass.
        compute_shares: each gradient's share of the backward time, `(n_gradients,)`, in proportion to the
            multiply-adds of its layer. They sum to 1.
        backward_s: seconds of the backward pass for `BATCH` samples at `SUSTAINED_MACS_PER_S`.
    """

    name: str
    layout: GradientLayout
    compute_shares: tuple[float, ...]
    backward_s: float

    def profile(self, *, backward_s: float | None = None, forward_s: float | None = None) -> Profile:
        """Return ready times for a backward pass of `backward_s`. The forward pass takes half of it by default."""
        total_s = self.backward_s if backward_s is None else backward_s
        return Profile.from_durations(
            [share * total_s for share in self.compute_shares],
            forward_s=total_s / 2 if forward_s is None else forward_s,
        )

    def shortest_step_s(self, *, compute_s: float, communication_s: float, overlaps_forward: bool = False) -> float:
        """Return the shortest step for any division into units, if the link is idle only when nothing can be sent.

        Without `overlaps_forward`, the update waits for all gradients, and nothing is sent in the forward pass, a third
        of the computation. With it, the next forward pass waits for a gradient only when it reads the parameter. From
        this read until the gradient is ready again, neither this gradient nor the gradients of parameters that are read
        earlier can be sent.
        """
        waits_s = 0.0 if overlaps_forward else compute_s / 3
        total, left, ready_s, end_s = sum(self.layout.sizes), 1.0, waits_s, compute_s
        for size, share in zip(self.layout.sizes, self.compute_shares, strict=True):
            ready_s += (compute_s - waits_s) * share
            end_s = max(end_s, ready_s + left * communication_s)
            left -= size / total
        return end_s

    def scaled(self, fraction: float) -> Workload:
        """Return the workload with `fraction` of each gradient's elements, for small machines."""
        layout = GradientLayout(
            sizes=tuple(max(1, round(size * fraction)) for size in self.layout.sizes),
            itemsize_bytes=self.layout.itemsize_bytes,
            dtype=self.layout.dtype,
            device=self.layout.device,
            names=self.layout.names,
        )
        return Workload(
            name=f"{self.name} × {fraction:g}",
            layout=layout,
            compute_shares=self.compute_shares,
            backward_s=self.backward_s,
        )


def workload(name: str) -> Workload:
    """Return one of `NETWORKS` with float32 gradients."""
    backward = NETWORKS[name]()[::-1]
    total_macs = sum(parameter.macs for parameter in backward)
    return Workload(
        name=name,
        layout=GradientLayout(
            sizes=tuple(parameter.numel for parameter in backward),
            names=tuple(parameter.name for parameter in backward),
        ),
        compute_shares=tuple(parameter.macs / total_macs for parameter in backward),
        backward_s=2 * total_macs * BATCH[name] / SUSTAINED_MACS_PER_S,
    )


# Latency and rates of a ring by fabric. The latency of a TCP hop is derived from the ASC-WFBP paper: 1.4 ms for 32
# ranks on 10 Gbit/s Ethernet, hence 1.4 ms / (2 · 31). One host's "flow" is a thread that copies via shared memory.
_FABRICS = {
    "10 Gbit/s TCP": {"hop_s": 22.6e-6, "link_bytes_per_s": 10 * GBIT, "flow_bytes_per_s": 10 * GBIT / 3},
    "30 Gbit/s TCP": {"hop_s": 22.6e-6, "link_bytes_per_s": 30 * GBIT, "flow_bytes_per_s": 10 * GBIT},
    "100 Gbit/s RDMA": {"hop_s": 4e-6, "link_bytes_per_s": 100 * GBIT, "flow_bytes_per_s": 95 * GBIT},
    "one host": {"hop_s": 1e-6, "link_bytes_per_s": 8e9, "flow_bytes_per_s": 6e9},
}
FABRICS = tuple(_FABRICS)
RANKS = (8, 64, 256)


def cluster(fabric: str, ranks: int) -> Cluster:
    """Return a cluster of `ranks` ranks on one of `FABRICS`."""
    return Cluster(name=f"{fabric}, {ranks} ranks", ranks=ranks, **_FABRICS[fabric])
