"""AIACC's scaling figures by simulation: its cloud, its competitors and its own streams, on networks that it names.

References are to the AIACC paper (figures 2, 9 to 12 and 14). The figures themselves are missing from the text, so what
is compared are the numbers that the text states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.lib.horovod import horovod_groups
from bench.lib.workloads import BATCH, GBIT, Workload, workload
from sirtaki.autotune.arms.planner import cuts_for_groups
from sirtaki.autotune.knobs import MIB, KnobLattice, KnobSpace
from sirtaki.autotune.model.calibration import Cluster
from sirtaki.autotune.model.simulator import Simulator
from sirtaki.comm.plan import Algorithm, TransportKind

GPUS_PER_NODE = 8
LINK_BYTES_PER_S = 30 * GBIT  # of a node, section VII-A
ONE_STREAM = 0.3  # share of the link that a single stream can use at most, section III
NETWORK_HOP_S, NVLINK_HOP_S = 22.6e-6, 3e-6
V100_OVER_2080TI = 1.1
SAMPLES = 64  # a GPU
DDP_FIRST_BYTES, DDP_BYTES = MIB, 25 * MIB
STREAMS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
ROUTE = (TransportKind.NCCL, Algorithm.FLAT)
METHODS = ("DDP", "Horovod", "AIACC")

NOTES = (
    "AIACC, cloud: nodes of 8 V100 on 30 Gbit/s, one ring over all GPUs, which leaves each node once; a single stream "
    "gets at most 30 % of the link (section III). A hop costs 22.6 µs between nodes (ASC-WFBP's a) and 3 µs inside "
    "(assumed).",
    "AIACC, compute: float32, 64 samples a GPU (the paper has BytePS's batches, which are 64 for BERT-Large), 1.1 "
    "times as fast as an RTX 2080 Ti; the forward pass takes half as long as the backward pass. Transformer and the "
    "production networks are left out: their layers and batches are not stated.",
    "AIACC, methods: DDP = buckets of 25 MiB after a first of 1 MiB, one stream; Horovod = fusion up to 64 MiB at "
    "ticks of 1 ms, one stream, its coordinator free of charge (which would lengthen the ticks, and so fuse more); "
    "AIACC = the best of uniform units on 1 to 24 streams, which is what its tuner searches. Contention for the GPU is "
    "not modelled. Scaling efficiency is T_N / (N T_1).",
    "AIACC, figures 9 to 12 and 14 show no numbers in the text at hand; what the text states of them is beside. "
    "Frameworks differ by what is not communication, so figures 11 and 12 (TensorFlow, MXNet) are predicted like 9 "
    "and 10.",
)

PRINTED = {  # (network, GPUs, what): as stated in sections III and VIII-A
    ("resnet50", 32, "DDP"): 0.79,
    ("resnet50", 32, "Horovod"): 0.75,
    ("resnet50", 32, "AIACC"): 0.96,
    ("resnet50", 32, "AIACC ÷ Horovod"): 1.3,
    ("vgg16", 32, "Horovod"): 0.40,
    ("vgg16", 32, "AIACC ÷ Horovod"): 1.8,
    ("bert_large", 32, "Horovod"): 0.40,
    ("resnet50", 256, "AIACC"): 0.95,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One network on a number of GPUs.

    Attributes:
        efficiency: T_N / (N T_1) of each of `METHODS`.
        streams: how many AIACC's best setting has.
    """

    efficiency: dict[str, float]
    streams: int


def cluster(gpus: int) -> Cluster:
    """So many GPUs of the paper's cloud, of two nodes or more."""
    nodes = gpus // GPUS_PER_NODE
    return Cluster(
        name=f"{gpus} V100, 30 Gbit/s",
        ranks=gpus,
        hop_s=(nodes * NETWORK_HOP_S + (gpus - nodes) * NVLINK_HOP_S) / gpus,
        link_bytes_per_s=LINK_BYTES_PER_S,
        flow_bytes_per_s=ONE_STREAM * LINK_BYTES_PER_S,
    )


def scaling(name: str, gpus: int, *, batch: int = SAMPLES) -> Scaling:
    """Each method's scaling efficiency with so many samples a GPU."""
    network = workload(name)
    backward_s = network.backward_s * batch / BATCH[name] / V100_OVER_2080TI
    profile = network.profile(backward_s=backward_s)
    simulator = Simulator(layout=network.layout, profile=profile, link=cluster(gpus).link(max_streams=STREAMS[-1]))
    alone_s = profile.forward_s + profile.compute_s
    sizes = [size * network.layout.itemsize_bytes for size in network.layout.sizes]
    ends, noticed_s = horovod_groups(profile.issuable_s, sizes)
    at_ticks = replace(profile, ready_s=noticed_s, compute_s=max(profile.compute_s, noticed_s[-1]))
    horovod = Simulator(layout=network.layout, profile=at_ticks, link=simulator.link)
    space = KnobSpace(
        routes=(ROUTE,), streams=STREAMS, unit_bytes=(MIB // 4, min(256 * MIB, network.layout.total_bytes))
    )
    best = min(KnobLattice(space, steps_per_octave=1).points, key=lambda knobs: simulator.run_knobs(knobs).iteration_s)
    iterations_s = {
        "DDP": simulator.run_cuts(cuts_for_groups(network.layout, ddp_buckets(network), streams=1)).iteration_s,
        "Horovod": horovod.run_cuts(cuts_for_groups(network.layout, ends, streams=1)).iteration_s,
        "AIACC": simulator.run_knobs(best).iteration_s,
    }
    return Scaling(
        efficiency={method: alone_s / taken_s for method, taken_s in iterations_s.items()}, streams=best.streams
    )


def ddp_buckets(network: Workload) -> list[int]:
    """Ends of DistributedDataParallel's buckets: whole gradients in order until a bucket is full."""
    ends: list[int] = []
    filled, limit = 0, DDP_FIRST_BYTES
    for end, size in enumerate(network.layout.sizes, start=1):
        filled += size * network.layout.itemsize_bytes
        if filled >= limit or end == len(network.layout.sizes):
            ends.append(end)
            filled, limit = 0, DDP_BYTES
    return ends
