"""Runs an example slowly enough that it can be killed in the middle: python slowed.py EXAMPLE.

SLOWED_S says how much longer each of its modules takes, in seconds; from 0.1 on each is told.
"""

import os
import runpy
import sys
import time

from torch.nn.modules.module import register_module_forward_hook

slowed_s = float(os.environ.get("SLOWED_S", "0.005"))


def wait(*_: object) -> None:
    if slowed_s >= 0.1:
        print("slowed", flush=True)
    time.sleep(slowed_s)


register_module_forward_hook(wait)
runpy.run_path(sys.argv[1], run_name="__main__")
