"""Print the attributes of PyTorch's NCCL process group in the installed release, as an entry of `nccl_attributes.json`.

    python tests/formats/nccl_attributes.py

Needs a CUDA build of PyTorch, and no GPU. Attributes are read from the classes themselves, because the stub file
`torch/_C/_distributed_c10d.pyi` of the same release lists only some of them.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

CALLS = (
    "__init__",
    "allreduce",
    "_reduce_scatter_base",
    "_allgather_base",
    "shutdown",
    "abort",
    "_shutdown",
    "get_error",
)


def public_names(cls: type) -> list[str]:
    """Return the names of a class and its bases, without Python's own and pybind11's."""
    return [
        name
        for name in sorted(dir(cls))
        if not (name.startswith("__") and name.endswith("__")) and "pybind" not in name
    ]


def signatures(cls: type, name: str) -> list[str]:
    """Return the overloads of a method as pybind11 documents them, without addresses of default values."""
    lines = (getattr(cls, name).__doc__ or "").splitlines()
    return [line.strip().partition(" object at 0x")[0] for line in lines if "->" in line]


def entry() -> dict[str, Any]:
    """Return the classes by name, each with its attributes; None if the release lacks a class."""
    group = dist.ProcessGroupNCCL
    options = group.Options()
    config = type(options.config) if hasattr(options, "config") else None
    nccl = torch.cuda.nccl.version()
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)),
        "ProcessGroupNCCL": public_names(group),
        "ProcessGroupNCCL.Options": public_names(group.Options),
        "ProcessGroupNCCL.NCCLConfig": config and public_names(config),
        "Work": public_names(_distributed_c10d.Work),
        "AllreduceOptions": public_names(_distributed_c10d.AllreduceOptions),
        "ReduceScatterOptions": public_names(_distributed_c10d.ReduceScatterOptions),
        "AllgatherOptions": public_names(_distributed_c10d.AllgatherOptions),
        "ErrorType": sorted(_distributed_c10d.ErrorType.__members__)
        if hasattr(_distributed_c10d, "ErrorType")
        else None,
        "overloads": {name: len(signatures(group, name)) for name in CALLS if hasattr(group, name)},
    }


if __name__ == "__main__":
    print(json.dumps({torch.__version__.partition("+")[0]: entry()}, indent=1))
