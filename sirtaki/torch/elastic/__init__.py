"""Horovod's `elastic` interface: `import sirtaki.torch.elastic`, or `hvd.elastic`.

State can be committed, synchronised and restored, and the sampler distributes the remaining samples of an epoch. In an
elastic job, training continues when ranks are lost, added or removed. In other jobs, the loss of a rank ends the job.
"""

from ..basics import init, shutdown
from .sampler import ElasticSampler
from .state import ObjectState, State, TorchState, run, run_fn

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]
