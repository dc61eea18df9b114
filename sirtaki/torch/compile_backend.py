"""A backend for `torch.compile` that makes gradients ready during the backward pass, not all at its end.

AOTAutograd compiles the backward pass of a graph to a single autograd node, and autograd accumulates the gradients of a
node when the node ends. If a model is compiled as a whole, all gradients are therefore ready at once, and no
computation is left to overlap with their reduction. This backend splits the forward graph with PyTorch's
`DDPOptimizer`, which PyTorch uses to split graphs at DDP's buckets, and compiles each part separately.
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
from sirtaki.errors import ConfigError, require

logger = logging.getLogger(__name__)

PARTS = 4
"""Default number of parts into which a graph is split if ranks are on several hosts.

More parts hide more communication, but make the computation slower.
"""

LEAST_PART_BYTES = 1 << 20
"""Minimum bytes of gradients in a part of a split graph, equal to the size of DDP's first bucket.

For a smaller part, splitting costs more time than the overlap of communication saves.
"""

Compiled = Callable[..., Any]
Compiler = Callable[..., Compiled]


@dataclass(frozen=True, slots=True)
class EarlyGradients:
    """A Dynamo backend that splits a model's graph into parts and compiles each part separately.

    Instances with equal attributes are equal, so that Dynamo does not compile a model again for an equal backend.

    Attributes:
        backend: compiler of each part: a name or function, as for `torch.compile`.
        part_bytes: bytes of gradients in a part. None for the default of `early_gradients`.
    """

    backend: str | Compiler
    part_bytes: int | None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
        """Split a graph that Dynamo has captured, and compile its parts. Called by Dynamo.

        Return the compiled graph.

        Args:
            graph: the graph to compile.
            inputs: example inputs of the graph.
            options: the arguments `mode=` and `options=` of `torch.compile`.
        """
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
        except NotImplementedError as err:
            # In older versions of PyTorch, the splitter rejects a graph that calls another graph.
            logger.warning(
                "PyTorch cannot split a graph with %d bytes of gradients, so the graph is compiled as a whole: %s",
                n_bytes,
                err,
            )
            return compiler(graph, inputs)
        logger.info(
            "torch.compile compiles a graph with %.1f MB of gradients in %d parts, so that the gradients of one part "
            "can be reduced during the backward passes of the others",
            n_bytes / 1e6,
            len(splitter.buckets),
        )
        return compiled


def early_gradients(backend: str | Compiler = "inductor", *, part_bytes: int | None = None) -> EarlyGradients:
    """Return a `torch.compile` backend that makes gradients ready while the backward pass still computes other ones.

        model = torch.compile(model, backend=hvd.early_gradients())

    The backend compiles the model in parts. The results of the model are unchanged. `mode=` and `options=` of
    `torch.compile` apply to the compiler of the parts. A graph compiled without gradients is not split. Not collective.

    Args:
        backend: compiler of each part: a name or function, as for `torch.compile`.
        part_bytes: bytes of gradients in a part. None for the value in the plan of `sirtaki optimize`
            (`SIRTAKI_PLAN`). Without a plan, None means a quarter of the graph's gradients. Then the graph is not split
            if all ranks are on one host, or if `hvd.init()` was not called before the model first runs.

    Raises:
        ValueError: `part_bytes` is not positive.
        ConfigError: this Python or PyTorch cannot compile models.
    """
    require(part_bytes is None or part_bytes > 0, "part_bytes of early_gradients()", "a positive number", part_bytes)
    try:
        import_module("torch._dynamo.backends.distributed")
    except (ImportError, RuntimeError) as err:
        raise ConfigError(
            f"torch.compile is not available in this environment ({err}); train the model without torch.compile"
        ) from err
    return EarlyGradients(backend, part_bytes)


def usual_part_bytes(n_bytes: int) -> int:
    """Return the default bytes of gradients in a part, for a graph with `n_bytes` of gradients.

    0 = do not split the graph.
    """
    if not job.is_initialized() or job.current().size == 1:
        return 0
    current = job.current()
    if current.part_bytes is not None:
        return current.part_bytes
    if current.control.one_node:
        return 0
    return max(LEAST_PART_BYTES, n_bytes // PARTS)


def gradient_bytes(graph: torch.fx.GraphModule) -> int:
    """Return the bytes of the trainable parameters of a Dynamo graph, which are its inputs or its attributes."""
    inputs = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    parameters = [*graph.parameters(), *(one for one in inputs if isinstance(one, nn.Parameter))]
    return sum(one.untyped_storage().nbytes() for one in parameters if one.requires_grad)


def _compiler(backend: str | Compiler, options: dict[str, Any]) -> Compiler:
    """Return the function that compiles a part of a graph with `backend` and the `options` given to `torch.compile`."""
    found: Compiler = torch._dynamo.lookup_backend(backend)
    if backend == "inductor" and options:
        from torch._inductor import list_mode_options

        mode = options.get("mode")
        patches = {**(list_mode_options(mode) if mode else {}), **(options.get("options") or {})}
        options = {"config_patches": {name.replace("-", "_"): value for name, value in patches.items()}}
    if not options:
        return found
    return lambda graph, inputs: found(graph, inputs, **options)
