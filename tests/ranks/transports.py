"""Run the conformance suite over every route of this job. Started by test_transports.py with several ranks."""

import os
import time

from conformance.transport import check_route

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.router import Router
from sirtaki.engine.ranks import open_ranks
from sirtaki.engine.settings import Settings

local_size = os.environ.get("TEST_LOCAL_SIZE")
control = ControlPlane(open_ranks(Settings.from_environ()), local_size=int(local_size) if local_size else None)
for direct in (False, True):
    router = Router(control, timeout_s=30.0, direct=direct)
    for route in [route for route in router.routes if not direct or route[0] is TransportKind.GLOO]:
        begin = time.perf_counter()
        check_route(control, router, route)
        if control.rank == 0:
            name = f"{route[0].value} {route[1].value}{' direct' if direct else ''}"
            print(f"ok {name} {time.perf_counter() - begin:.1f} s", flush=True)
    router.close()
control.close()
