"""Run scripts in sequence, on any number of ranks, and keep each rank's output, parameters and files.

    python playing.py RESULTS SCRIPT...

Each script runs in its own folder RESULTS/NAME, which all ranks share. RESULTS/NAME.RANK.pt has its results.
"""

import contextlib
import io
import logging
import os
import random
import runpy
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

from sirtaki.run import as_horovod

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
RANKS = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


def play(script: Path, results: Path) -> None:
    folder = results / script.stem
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    trained: list[torch.Tensor] = []
    written: list[str] = []
    watching = True
    plain, save = torch.optim.Optimizer.__init__, torch.save

    def init(self, params, defaults):  # type: ignore[no-untyped-def]
        plain(self, params, defaults)
        trained.extend(param for group in self.param_groups for param in group["params"])

    def saved(obj: object, f: object, *args: object, **options: object) -> None:
        if isinstance(f, str | os.PathLike):
            written.append(str(f))  # torch writes files beside Python
        save(obj, f, *args, **options)

    def watch(event: str, args: tuple[object, ...]) -> None:
        if watching and event == "open" and isinstance(args[0], str) and set(str(args[1] or "")) & set("wax+"):
            path = Path(args[0]).resolve()
            if path.is_relative_to(folder.resolve()):
                written.append(str(path.relative_to(folder.resolve())))

    sys.addaudithook(watch)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    sys.argv = [str(script)]
    torch.optim.Optimizer.__init__, torch.save = init, saved  # type: ignore[method-assign]
    printed, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
    except BaseException:  # a script may end in any way
        error = traceback.format_exc()
    finally:
        torch.optim.Optimizer.__init__, torch.save = plain, save  # type: ignore[method-assign]
        watching = False
        logging.disable(logging.NOTSET)
    left = {
        "printed": printed.getvalue(),
        "trained": [param.detach().clone() for param in trained],
        "written": written,
        "error": error,
    }
    torch.save(left, results / f"{script.stem}.{RANK}.pt")
    if "sirtaki.torch" in sys.modules:
        import sirtaki.torch as hvd

        if hvd.is_initialized():
            hvd.shutdown()


def main() -> None:
    results, *scripts = map(Path, sys.argv[1:])
    os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    sys.path.insert(0, str(as_horovod.SHIM))
    for script in scripts:
        play(script, results)


if __name__ == "__main__":
    main()
