"""Check by CUDA's debug mode that no call in a training step makes the host wait, and that no graph captures a step."""

from __future__ import annotations

import time

from bench.gpu.contenders import GpuAttached, Optimizer, open_group
from bench.gpu.models import small_mlp
from bench.gpu.runner import RankRun
from sirtaki.errors import ConfigError

QUEUED_S = 0.2


def run(run: RankRun) -> None:
    """Check the optimizer and attached DDP, each after the steps in which it learns the gradients' order."""
    place = run.place
    open_group(place, run.rank, run.size)
    for name, contender in (("optimizer", Optimizer), ("attached", GpuAttached)):
        with run.check(f"{name}: three steps without a synchronising call") as found:
            loop = contender(place, small_mlp(place.torch_device))
            loop.warm_up()
            with place.synchronisations() as calls:
                for _ in range(3):
                    loop.step()
            found["calls"] = calls
            assert not calls, calls
        if place.dry:  # Skip the next check in a dry run, which executes operations immediately.
            loop.close()
            continue
        with run.check(f"{name}: a step returns while the GPU is busy with earlier work") as found:
            place.device.synchronise()
            place.sleep(QUEUED_S)
            begin_s = time.perf_counter()
            loop.step()
            found["step_s"] = time.perf_counter() - begin_s
            place.device.synchronise()
            found["until_done_s"] = time.perf_counter() - begin_s
            assert found["step_s"] < 0.5 * found["until_done_s"], found
        loop.close()
    with run.check("a CUDA graph of a whole step is refused, and training goes on") as found:
        loop = Optimizer(place, small_mlp(place.torch_device))
        loop.warm_up()
        error: BaseException | None = None
        try:
            place.capture(loop.step)
        except Exception as err:
            error = err
            found["error"] = repr(err)
        while error is not None and not isinstance(error, ConfigError):
            error = error.__context__  # The end of the capture may raise, too.
        assert error is not None, found
        place.device.synchronise()
        loop.optimizer.zero_grad()
        loop.warm_up()
        loop.close()
