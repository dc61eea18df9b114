"""A process group whose ranks connect by the launcher's variables. Started by test_meeting.py."""

import torch
import torch.distributed as dist

import sirtaki.torch.distributed  # noqa: F401

dist.init_process_group("sirtaki", init_method="sirtaki://")
dist.all_reduce(total := torch.ones(100_000))
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total[0]:.0f}", flush=True)
dist.destroy_process_group()
