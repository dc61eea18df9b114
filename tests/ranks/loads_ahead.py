"""Print the ranks on which `init()` preloads the modules of a registry look-up."""

import sirtaki.torch as hvd
from sirtaki.engine import job

job.load_ahead = lambda registry: print("loads ahead", flush=True)
hvd.init()
hvd.shutdown()
