"""PyTorch's own tests of process groups, over the backend "sirtaki". Started by test_torch_process_groups.py.

They choose what they try by the name of the backend, and are told "gloo", whose contract ours has; every group they
open is ours. Ranks are forked, as importing PyTorch takes longer than a test. Each test is a line: its name, how it
went, and why.
"""

import os
import unittest
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import distributed_test

import sirtaki.torch.distributed.process_group  # noqa: F401


class OverSirtaki(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, *args: Any, **options: Any) -> None:
        if test_name == "test_ddp_logging_data_cpu":  # it asks for times of DDP's own all-reduces
            os.environ["SIRTAKI_ATTACH"] = "0"
        begin = dist.init_process_group
        dist.init_process_group = lambda *of, **kind: begin(*of, **{**kind, "backend": "sirtaki"})
        super()._run(rank, test_name, *args, **options)


class Lines(unittest.TestResult):
    def addSuccess(self, test: unittest.TestCase) -> None:
        print(test._testMethodName, "passed", flush=True)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        print(test._testMethodName, "failed", repr(str(err[1])), flush=True)

    addFailure = addError


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    unittest.TestLoader().loadTestsFromTestCase(OverSirtaki).run(Lines())
