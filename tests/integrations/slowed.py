"""Runs an example slowly enough that it can be killed in the middle: python slowed.py EXAMPLE."""

import runpy
import sys
import time

from torch.nn.modules.module import register_module_forward_hook

register_module_forward_hook(lambda *_: time.sleep(0.005))
runpy.run_path(sys.argv[1], run_name="__main__")
