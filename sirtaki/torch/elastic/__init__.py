"""Horovod's `elastic` interface: `import sirtaki.torch.elastic`, or `hvd.elastic`.

A state object saves the training state in memory (`commit`), restores it, and copies it between ranks. A sampler
distributes the remaining samples of an epoch over the ranks. In an elastic job, training continues when ranks are lost,
added or removed. In other jobs, the loss of a rank ends the job.

Words of this package: A *commit* is a copy of the training state in memory. A *generation* is the time between two
changes of the set of ranks.
"""

from ..basics import init, shutdown
from .sampler import ElasticSampler
from .state import ObjectState, State, TorchState, run, run_fn

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]
