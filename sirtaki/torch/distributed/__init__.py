"""The torch.distributed backend `init_process_group("sirtaki")`, for scripts that do not call functions of Sirtaki.

Importing this package registers the backend. From PyTorch 2.5 on, `import torch` already registers it, because the
installed Sirtaki package declares an entry point for backends. `init_method="sirtaki://"` connects the ranks under
every launcher that `hvd.init()` supports, including mpiexec.
"""

from sirtaki.torch_backend import NAME, register

__all__ = ["NAME", "register"]

register()
