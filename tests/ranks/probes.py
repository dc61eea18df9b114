"""Probes with time budgets that differ between ranks. Started by test_probes.py."""

import sys

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.router import Router
from sirtaki.engine.ranks import open_ranks
from sirtaki.engine.settings import Settings
from sirtaki.engine.tuning.plans import probe_routes

control = ControlPlane(open_ranks(Settings.from_environ()))
router = Router(control, timeout_s=30)
route = router.routes[-1]
budget_s = float(sys.argv[1 + control.rank])
probes = probe_routes(control, router, [route], max_streams=4, budget_s=budget_s)[route]
print(control.rank, *(f"{probe.unit_bytes}x{probe.streams}x{probe.rounds}" for probe in probes), flush=True)
control.barrier()
router.close()
control.close()
