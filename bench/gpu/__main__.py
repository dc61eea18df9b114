"""`python -m bench.gpu`; `bench/gpu.sh` installs what is missing first."""

import os
import sys

# Ranks are forked from this process. Therefore NumPy must start no threads here, and PyTorch must not initialise CUDA.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from bench.gpu.runner import main

if __name__ == "__main__":
    sys.exit(main())
