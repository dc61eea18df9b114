#!/usr/bin/env bash
# Run all checks and measurements that need a GPU, in less than six minutes, from a plain checkout, without a network:
#
#     bench/gpu.sh [--only PART ...] [--out FOLDER] [--dry-run]
#
# `python3` ($PYTHON) must have a CUDA build of PyTorch. Other missing packages are installed from the folder $WHEELS
# (.gpu-wheels). Fill it by `python3 bench/gpu_wheels.py fetch .gpu-wheels` on a machine with a network.
# Each part appends a line to results.jsonl in FOLDER (bench/raw/gpu) as soon as it ends. Status: 0 if all parts passed,
# 1 if a part failed, 2 without a GPU, 3 if a package could not be installed. See `--help`.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
case " $* " in *" --help "* | *" -h "*) exec "$python" -m bench.gpu --help ;; esac
if ! nvidia-smi; then
    case " $* " in
    *" --dry-run "*) echo "bench/gpu.sh: found no GPU; --dry-run needs none" ;;
    *)
        echo "bench/gpu.sh: nvidia-smi found no GPU; use --dry-run to run without one"
        exit 2
        ;;
    esac
fi
"$python" bench/gpu_wheels.py install "${WHEELS:-.gpu-wheels}" || exit 3
export BENCH_GPU_INSTALL_S=$SECONDS
exec "$python" -m bench.gpu "$@"
