"""Horovod's `elastic` interface over a fixed set of ranks: `import sirtaki.torch.elastic`, or `hvd.elastic`.

Scripts written for elastic training run: state is committed, synchronised and restored, and the sampler deals out what
an epoch has left. Ranks do not come and go; the loss of one ends the job, and its next start goes on from what the
script itself has saved.
"""

from ..basics import init, shutdown
from .repeating import run, run_fn
from .sampler import ElasticSampler
from .state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]
