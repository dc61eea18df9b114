"""A backend for `torch.compile` whose models have their gradients come one after the other, not all at the end.

AOTAutograd makes one node of the backward pass of whatever it is given, and autograd hands on what a node has computed
when it ends: the gradients of a model that is compiled as a whole all come at once, and nothing is left that could hide
how they travel. So the forward graph is cut, by PyTorch's own `DDPOptimizer`, which does it for DDP's buckets, and each
part is compiled by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from sirtaki.engine import job
from sirtaki.errors import ConfigError

logger = logging.getLogger(__name__)

PARTS = 4
"""Between hosts, where nothing else is known: as many as hide most of what travels, few enough to cost little."""

LEAST_PART_BYTES = 1 << 20
"""DDP's first bucket; what is smaller travels in less time than a part costs."""

Compiled = Callable[..., Any]  # what a compiler makes of a graph
Compiler = Callable[..., Compiled]


@dataclass(frozen=True, slots=True)
class EarlyGradients:
    """A backend of Dynamo; equal ones compile alike.

    Attributes:
        backend: that compiles each part.
        part_bytes: see `early_gradients`.
    """

    backend: str | Compiler
    part_bytes: int | None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
        """Compiles a graph of Dynamo's, in as many parts as its parameters come to; `options` are `torch.compile`'s."""
        compiler = _compiler(self.backend, options)
        if not torch.is_grad_enabled():
            return compiler(graph, inputs)
        n_bytes = gradient_bytes(graph)
        part_bytes = usual_part_bytes(n_bytes) if self.part_bytes is None else self.part_bytes
        if not 0 < part_bytes < n_bytes:
            return compiler(graph, inputs)
        from torch._dynamo.backends.distributed import DDPOptimizer

        splitter = DDPOptimizer(part_bytes, compiler, first_bucket_cap=part_bytes)
        try:
            compiled: Compiled = splitter.compile_fn(graph, list(inputs))
        except NotImplementedError as err:  # older versions of torch, of what calls another graph: checkpointing
            logger.warning("a graph with %d bytes of gradients is compiled as a whole: %s", n_bytes, err)
            return compiler(graph, inputs)
        logger.info(
            "a graph with %.1f MB of gradients is compiled in %d parts, which give theirs early",
            n_bytes / 1e6,
            len(splitter.buckets),
        )
        return compiled


def early_gradients(backend: str | Compiler = "inductor", *, part_bytes: int | None = None) -> EarlyGradients:
    """Not collective: `torch.compile(model, backend=hvd.early_gradients())` gives gradients while others are computed.

    The model is compiled in parts; what it computes stays the same. `mode=` and `options=` of `torch.compile` go to
    what compiles the parts. Graphs that are compiled without gradients stay whole.

    Args:
        backend: that compiles each part, as `torch.compile` takes it.
        part_bytes: a part ends where it has as many bytes of gradients. None = what the plan of `sirtaki optimize`
            says (`SIRTAKI_PLAN`); without one, a quarter of the graph's, but whole where all ranks are on one
            host, there is but one, or `hvd.init()` has not been called when the model is first run.

    Raises:
        ValueError: `part_bytes` is not positive.
        ConfigError: this Python or PyTorch cannot compile models.
    """
    if part_bytes is not None and part_bytes <= 0:
        raise ValueError(f"part_bytes must be positive, not {part_bytes}")
    try:
        import_module("torch._dynamo.backends.distributed")
    except (ImportError, RuntimeError) as err:
        raise ConfigError(f"torch.compile is not available here ({err}): train the model uncompiled") from err
    return EarlyGradients(backend, part_bytes)


def usual_part_bytes(n_bytes: int) -> int:
    """Of a graph with so many bytes of gradients; 0 = it stays whole."""
    if not job.is_initialized() or job.current().size == 1:
        return 0
    current = job.current()
    if current.part_bytes is not None:
        return current.part_bytes
    if current.control.one_node:
        return 0
    return max(LEAST_PART_BYTES, n_bytes // PARTS)


def gradient_bytes(graph: torch.fx.GraphModule) -> int:
    """Of all parameters that a graph of Dynamo's uses, whether they are its inputs or its own."""
    given = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    parameters = [*graph.parameters(), *(one for one in given if isinstance(one, nn.Parameter))]
    return sum(one.untyped_storage().nbytes() for one in parameters if one.requires_grad)


def _compiler(backend: str | Compiler, options: dict[str, Any]) -> Compiler:
    """With `mode=` and `options=` of `torch.compile`, as that hands them on."""
    found: Compiler = torch._dynamo.lookup_backend(backend)
    if backend == "inductor" and options:
        from torch._inductor import list_mode_options

        mode = options.get("mode")
        patches = {**(list_mode_options(mode) if mode else {}), **(options.get("options") or {})}
        options = {"config_patches": {name.replace("-", "_"): value for name, value in patches.items()}}
    if not options:
        return found
    return lambda graph, inputs: found(graph, inputs, **options)
