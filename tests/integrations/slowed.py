"""Run an example so slowly that it can be killed meanwhile: python slowed.py EXAMPLE.

SLOWED_S is the additional time of each module in seconds. From 0.1 on, each module is printed.
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
