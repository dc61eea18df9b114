"""Checks and measurements that need a GPU, in parts of some seconds each. `bench/gpu.sh` runs all parts.

    bench/gpu.sh                         all parts, in 330 s
    bench/gpu.sh --only order kernels    selected parts
    bench/gpu.sh --dry-run               all parts without a GPU: streams are threads, Gloo replaces NCCL

`parts` contains the parts, `runner` starts their ranks and writes the results, `place` is the GPU as the parts see it.
A part is a function that gets a `RankRun`, calls Sirtaki, and reports checks and figures.
"""
