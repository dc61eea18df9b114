"""A search over real steps of a sharded model, compared with one process. Started by test_fsdp.py.

The search's clock is manipulated, so that the best setting is known: steps take half ("fast" "WORD") or twice as long
("slow" "WORD") with settings whose description contains WORD. "real" does not change the clock. The third argument is
optional. "evaluated": the model and a part of it are evaluated between backward pass and update, and some passes fail.
"reordered": modules are used in another order from step 50 on. "refined": the model trains for 160 steps. "reordered
later": for 120 steps, and modules are used in another order once a setting changes after 40 steps without a change.
"old": PyTorch has no custom collectives. "method": the model is called through its own method. "prefetched": the script
sets forward prefetching. Rank 0 prints all settings that ran, in order.
"""

import functools
import os
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from ranks.fsdp_attached import DEVICE, Tower, forward_in, loss, set_clock, sharded, trains_alike
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from sirtaki.torch import fsdp


class Scoring(Tower):
    """A tower that is called through a method other than `forward`, registered with FSDP."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.score(inputs)

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.forward(inputs)


def main(which: str, word: str, what: str = "") -> None:
    if what == "old":
        del FSDPModule.set_custom_all_gather, FSDPModule.set_custom_reduce_scatter
    model, alone = sharded((Scoring if what == "method" else Tower)(blocks=2)), Tower(blocks=2)
    if what == "method":
        register_fsdp_forward_method(model, "score")
    if what == "prefetched":
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    seen: list[str] = []
    now_s, unchanged, later = 0.0, 0, False

    def passes(module: nn.Module, args: object) -> None:
        nonlocal now_s, unchanged, later
        setting = fsdp.describe(model)
        later = later or (what == "reordered later" and seen[-1:] != [setting] and unchanged > 40)
        unchanged = unchanged + 1 if seen[-1:] == [setting] else 0
        if seen[-1:] != [setting]:
            seen.append(setting)
        now_s += 1.0 if (word in setting) == (which == "fast") else 2.0

    model.first.register_forward_pre_hook(passes)
    if which != "real":
        set_clock(model, lambda: now_s)

    def evaluate() -> None:
        nonlocal now_s
        if what != "evaluated":
            return
        begun_s = now_s
        with torch.no_grad():
            loss(model, 0, 99)
            model.blocks[1](torch.ones(2, 33, dtype=torch.float64, device=DEVICE))
        model.reshard()  # because the root stays gathered
        if hasattr(model, "reset_iter_state"):  # FSDP versions without it cannot continue
            fails = model.blocks[1].register_forward_pre_hook(fail)
            with suppress(ArithmeticError):
                loss(model, 0, 98)
            fails.remove()
            model.reset_iter_state()
        now_s = begun_s

    def reorder() -> None:
        if later if what == "reordered later" else (what == "reordered" and len(steps_made) == 50):
            for each in (model, alone):
                each.forward = functools.partial(forward_in, each, list(each.blocks)[::-1])
        steps_made.append(0)

    steps_made: list[int] = []

    steps = int(os.environ["SIRTAKI_WARMUP_ITERATIONS"]) + 25  # so that a started proof can end
    if what in ("refined", "reordered later"):
        steps = 160 if what == "refined" else 120
    if which == "real":  # real times scatter, so that the proof may take all of its iterations
        steps += round(1.5 * steps)
    trains_alike(model, alone, steps=steps, tolerance=1e-11, before_update=evaluate, between=reorder)
    own = [each for each in dist.distributed_c10d._world.pg_map if each.group_desc == "fsdp_reduce_scatter"]
    if DEVICE != "cpu":  # Gloo's groups stay
        assert len(own) == ("PyTorch" in seen[-1] and "2 streams" in seen[-1]), "a communicator that is not used stays"
    assert own or "2 streams" not in seen[-1] or "PyTorch" not in seen[-1]
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    assert all(each == seen for each in every), "ranks ran different settings"
    if dist.get_rank() == 0:
        print("\n".join(seen))


def fail(module: nn.Module, args: object) -> None:
    raise ArithmeticError


if __name__ == "__main__":
    # Because ranks of a test share a GPU.
    os.environ.setdefault("NCCL_HOSTID", os.environ.get("OMPI_COMM_WORLD_RANK", ""))
    dist.init_process_group("gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:nccl")
    main(*sys.argv[1:])
    dist.destroy_process_group()
