"""Horovod's `elastic` interface: `import sirtaki.torch.elastic`, or `hvd.elastic`.

State is committed, synchronised and restored, and the sampler deals out what an epoch has left. Where a launcher lets
ranks come and go, training goes on when one is lost, comes or leaves; where ranks stay, the loss of one ends the job.
"""

from ..basics import init, shutdown
from .sampler import ElasticSampler
from .state import ObjectState, State, TorchState, run, run_fn

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]
