#!/bin/bash
# Ranks come and go: when one is killed, or a node is lost, the others go on.
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
trap : TERM # of which Slurm tells sirtakirun, too: the shell waits for it
while kill -0 $launcher 2>/dev/null; do
    wait $launcher
done
wait $launcher
code=$?

# The job's time is up soon, and the last commit is on disk.
if [ "$told" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
