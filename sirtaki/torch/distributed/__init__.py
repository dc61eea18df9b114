"""A backend of torch.distributed: `init_process_group("sirtaki")`, for scripts that know nothing of Sirtaki.

Importing this registers it. From PyTorch 2.5 on nothing need be imported: `import torch` finds it by itself, as
Sirtaki's package says that it is there. `init_method="sirtaki://"` finds the ranks under every launcher that
`hvd.init()` knows, mpiexec too.
"""

from sirtaki.torch_backend import NAME, register

__all__ = ["NAME", "register"]

register()
