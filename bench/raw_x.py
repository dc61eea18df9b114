import sys, time, json
from typing import Any
import torch
from bench.lib.ranks import run_ranks, start, slowest
from bench.lib.cluster import NETWORKS, LabShape, MBIT
from dataclasses import replace
import statistics as st

def on_rank(comm, options):
    from sirtaki.engine import job as engine_job
    from sirtaki.comm.router import Router
    from sirtaki.comm.plan import CommPlan, Unit, TransportKind, Algorithm
    import sirtaki.torch as hvd
    job = engine_job.current()
    control = job.control if hasattr(job,"control") else job.ranks.control
    routers = {d: Router(control, timeout_s=60.0, direct=d) for d in (False, True)}
    out = []
    def retrans():
        rows=[l.split() for l in open("/proc/net/snmp") if l.startswith("Tcp:")]
        return int(rows[1][rows[0].index("RetransSegs")])
    def ext(name):
        rows=[l.split() for l in open("/proc/net/netstat") if l.startswith("TcpExt:")]
        return int(rows[1][rows[0].index(name)])
    for numel, unit, streams in options["plans"]:
        unit = min(unit, numel)
        cuts = list(range(0, numel, unit)) + [numel]
        plan = CommPlan(numel=numel, units=tuple(Unit(start=a, stop=b, stream=i % streams) for i, (a, b) in enumerate(zip(cuts, cuts[1:]))), streams=streams, transport=TransportKind.GLOO)
        rt={False:0,True:0}; to={False:0,True:0}; times = {False: [], True: []}; cpu = {False: 0.0, True: 0.0}
        for d, r in routers.items(): r.open_plan(plan)
        bufs = {d: r.allocate(numel, torch.float32) for d, r in routers.items()}
        for turn in range(2 * options["rounds"] + 2):
            d = bool(turn % 2)
            bufs[d].tensor.fill_(comm.rank)
            comm.barrier(); r0=retrans(); o0=ext("TCPTimeouts"); t = time.perf_counter(); c = time.process_time()
            routers[d].wait_for(routers[d].all_reduce_plan(bufs[d], plan))
            t = time.perf_counter() - t; c = time.process_time() - c
            t = comm.allreduce(t, max) if False else max(comm.allgather(t))
            rt[d]+=sum(comm.allgather(retrans()-r0)); to[d]+=sum(comm.allgather(ext("TCPTimeouts")-o0))
            if turn >= 2: times[d].append(t); cpu[d] += c
            assert float(bufs[d].tensor[0]) == sum(range(comm.size)) == float(bufs[d].tensor[-1])
        out.append([4*numel>>10, 4*unit>>10, streams, *[round(1e3*st.median(times[d]),2) for d in (False, True)], *[round(1e3*cpu[d]/options["rounds"],2) for d in (False,True)],rt[False],rt[True],to[False],to[True]])
    for r in routers.values(): r.close()
    return out

def main():
    shapes = {**{f"d{x}": replace(NETWORKS["capped"], delay_s=x*1e-3) for x in (0.5,1,2)}, "delayed": replace(NETWORKS["capped"], delay_s=5e-3), "capped": NETWORKS["capped"], "equal": NETWORKS["equal"]}
    K = 256
    plans = [[K*k, K*u, s] for k, u, s in [(16,16,1),(256,256,1),(1024,1024,1),(2048,512,4),(8192,2048,4),(8192,4096,2)]]
    for name in sys.argv[1:]:
        for row in run_ranks("bench.raw_x", shapes[name], {"plans": plans, "rounds": 5}):
            print(name, "KiB %d unit %d streams %d: ring %.2f direct %.2f ms; cpu %.1f %.1f retrans %d %d timeouts %d %d" % tuple(row), flush=True)
    return 0
if __name__ == "__main__":
    sys.exit(start(main, on_rank, gloo=True))
