"""Train until one rank makes an error. Started by test_faults.py."""

import os
import signal
import sys
import time
from enum import Enum
from typing import NoReturn

import torch

import sirtaki.torch as hvd
from sirtaki.comm.transports import shared_memory
from sirtaki.comm.transports.gloo import GlooTransport
from sirtaki.comm.transports.shared_memory import SharedMemoryTransport


class Fault(Enum):
    """Error of the failing rank in the tenth iteration."""

    NONE = "none"
    RAISE = "raise"
    EXIT = "exit"
    RAISE_EXIT = "raise_exit"
    LEAVE = "leave"
    KILL = "kill"
    STOP_CALLING = "stop_calling"
    EXIT_IN_C = "exit_in_c"
    FORK = "fork"
    TRANSPORT = "transport"
    TRANSPORT_THREAD = "transport_thread"
    MISMATCH = "mismatch"  # on all ranks, at the start


def broken(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("a broken transport")


def commit(fault: Fault) -> None:
    match fault:
        case Fault.RAISE:
            raise ValueError("a bad batch")
        case Fault.EXIT:
            sys.exit(3)
        case Fault.RAISE_EXIT:
            raise SystemExit(9)
        case Fault.LEAVE:
            sys.exit(0)
        case Fault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Fault.STOP_CALLING:
            time.sleep(60)
        case Fault.EXIT_IN_C:
            os._exit(5)
        case Fault.TRANSPORT:
            SharedMemoryTransport.all_reduce = GlooTransport.all_reduce = broken  # type: ignore[method-assign]
        case Fault.TRANSPORT_THREAD:
            shared_memory.reduce_share = broken
        case Fault.FORK:  # forking is not an error
            if (child := os.fork()) == 0:
                sys.exit(4)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def main(fault: Fault) -> None:
    hvd.init()
    if fault is Fault.MISMATCH:
        hvd.allreduce(torch.ones(3 + hvd.rank()), name="x")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for iteration in range(20):
        if iteration == 10 and hvd.rank() == 1:
            commit(fault)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    print(f"done {hvd.rank()}")


main(Fault(sys.argv[1]))
