"""Private names of PyTorch stand in few modules, so that a new version of PyTorch changes few modules."""

import re
from pathlib import Path

import pytest

from sirtaki.torch.fsdp import private

ROOT = Path(__file__).parents[2]
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for part in ("autotune", "comm", "registry", "sirtaki")
    for path in (ROOT / part).rglob("*.py")
    if "__pycache__" not in path.parts and not any(parent.is_symlink() for parent in path.parents)
}

OF_FSDP = [
    name
    for names in (*private.USED.values(), *private.CUSTOM.values())
    for name in names.split()
    if name[0] == "_" and "_forward" not in name
]

ADAPTERS = {
    "the autograd engine": (
        r"_execution_engine|_current_graph_task_id|_will_engine_execute_node",
        {"sirtaki/engine/autograd.py"},
    ),
    "FSDP2": (
        rf"distributed\.fsdp\._|\b(fsdp_params|mesh_info|{'|'.join(OF_FSDP)})\b",
        # `attach` is loaded by `import torch`, so that it may load no other module
        {"sirtaki/torch/fsdp/private.py", "sirtaki/attach.py"},
    ),
    "existing process groups": (
        r"distributed_c10d\._|c10d\._(world|get|new)|\._get_backend\(|bound_device_id",
        # `machine` keeps the script's groups in forked children, `shown` has process groups of its own
        {"sirtaki/engine/c10d.py", "sirtaki/machine.py", "sirtaki/torch/distributed/shown.py"},
    ),
    "modes": (
        r"_torch_(dispatch|function)_stack|_dispatch_stack_at|DisableTorchFunction|_disabled_torch_function|_functorch",
        {"comm/modes.py", "sirtaki/torch/overlap.py", "sirtaki/torch/distributed/shown.py"},
    ),
    "anything else": (
        # Classes of stores and works are public in torch.distributed, but take longer to import from there.
        r"torch\._C\b(?!\._distributed_c10d import [A-Z]\w+(, [A-Z]\w+)*\n)",
        {
            "comm/device.py",
            "comm/modes.py",
            "comm/nccl_streams/transport.py",
            "sirtaki/analysis/operators.py",
            "sirtaki/engine/autograd.py",
            "sirtaki/engine/reducing/distributed_autograd.py",
            "sirtaki/torch/distributed/shown.py",
            "sirtaki/torch/overlap.py",
            "sirtaki/uncompiled.py",
        },
    ),
}


@pytest.mark.parametrize("names", ADAPTERS)
def test_private_names_are_used_only_by_their_adapters(names: str) -> None:
    pattern, adapters = ADAPTERS[names]
    users = {name for name, source in SOURCES.items() if re.search(pattern, source)}
    assert users == adapters
