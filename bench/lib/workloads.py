"""What the benchmarks train on: layer lists of known networks, and descriptions of clusters.

A workload is a gradient layout in the order of the backward pass with the share of the backward time that each
gradient takes.
"""

from dataclasses import dataclass

from bench.lib.networks import NETWORKS
from sirtaki.autotune.model.calibration import Cluster
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout

GBIT = 1e9 / 8  # bytes per second

# Samples a rank, and sustained multiply-adds a second of one GPU such as the ASC-WFBP paper's RTX 2080 Ti: ResNet-152
# with 32 samples comes to 0.18 s of backward pass (their section VI-E) with this rate. A backward pass costs two
# multiplications for each one of the forward pass.
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
    """A network as the synchroniser sees it.

    Attributes:
        name: of the network.
        layout: gradients in the order of the backward pass.
        compute_shares: each gradient's share of the backward time, `(n_gradients,)`, in proportion to the
            multiply-adds of its layer (see `bench.lib.networks`); they add up to 1.
        backward_s: the backward time at `BATCH` samples and `SUSTAINED_MACS_PER_S`.
    """

    name: str
    layout: GradientLayout
    compute_shares: tuple[float, ...]
    backward_s: float

    def profile(self, *, backward_s: float | None = None, forward_s: float | None = None) -> Profile:
        """Ready times for a backward pass of that length; the forward pass takes half of it unless given."""
        total_s = self.backward_s if backward_s is None else backward_s
        return Profile.from_durations(
            [share * total_s for share in self.compute_shares],
            forward_s=total_s / 2 if forward_s is None else forward_s,
        )

    def scaled(self, fraction: float) -> "Workload":
        """The same network with each gradient cut to `fraction` of its elements, for machines that are too small."""
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
    """One of `bench.lib.networks.NETWORKS` with float32 gradients."""
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


# Each router for a ring of one size. The latency of a TCP hop is the ASC-WFBP paper's: a = 1.4 ms for 32 ranks on
# 10 Gbit/s Ethernet, so 1.4 ms / (2 · 31). One host's "flow" is one thread copying through shared memory.
_FABRICS = {
    "10 Gbit/s TCP": {"hop_s": 22.6e-6, "link_bytes_per_s": 10 * GBIT, "flow_bytes_per_s": 10 * GBIT / 3},
    "30 Gbit/s TCP": {"hop_s": 22.6e-6, "link_bytes_per_s": 30 * GBIT, "flow_bytes_per_s": 10 * GBIT},
    "100 Gbit/s RDMA": {"hop_s": 4e-6, "link_bytes_per_s": 100 * GBIT, "flow_bytes_per_s": 95 * GBIT},
    "one host": {"hop_s": 1e-6, "link_bytes_per_s": 8e9, "flow_bytes_per_s": 6e9},
}
FABRICS = tuple(_FABRICS)
RANKS = (8, 64, 256)


def cluster(router: str, ranks: int) -> Cluster:
    """One of `FABRICS` with that many ranks."""
    return Cluster(name=f"{router}, {ranks} ranks", ranks=ranks, **_FABRICS[router])


def clusters() -> list[Cluster]:
    """Every router with every number of `RANKS`."""
    return [cluster(router, ranks) for router in FABRICS for ranks in RANKS]
