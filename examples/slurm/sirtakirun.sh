#!/bin/bash
# An elastic job: when a rank is killed or a node is lost, the remaining ranks continue.
#   sbatch examples/slurm/sirtakirun.sh examples/elastic_digits.py
#SBATCH --job-name=elastic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

export SIRTAKI_CHECKPOINT_DIR=${CHECKPOINTS:-checkpoints}/$SLURM_JOB_ID

sirtakirun --min-np 1 python "$@" &
launcher=$!
trap 'told=yes; kill -TERM $launcher' USR1
trap : TERM # Slurm signals sirtakirun, too, and the shell waits for it
while kill -0 $launcher 2>/dev/null; do
    wait $launcher
done
wait $launcher
code=$?

# The time limit is near, and the last commit is on disk.
if [ "$told" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
