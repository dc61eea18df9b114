"""`python -m bench.gpu`; `bench/gpu.sh` installs what is missing first."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy starts threads, as ranks are forked from this process

from bench.gpu.runner import main

if __name__ == "__main__":
    sys.exit(main())
