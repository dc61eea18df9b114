"""What can only be tried and measured on a GPU, in parts of some seconds each; `bench/gpu.sh` runs all of them.

    bench/gpu.sh                         all parts, in 330 s
    bench/gpu.sh --only order kernels    some of them
    bench/gpu.sh --dry-run               all of them without a GPU: streams are threads, NCCL is Gloo

`parts` lists the parts, `runner` starts their ranks and writes the results, `place` is the GPU as the parts see it. A
part is a function that gets a `RankRun`, calls Sirtaki, and reports checks and figures.
"""
