#!/bin/bash
# One task per rank, without MPI. When requeued, the job resumes from its last commit.
#   sbatch examples/slurm/train.sh examples/elastic_digits.py
#   sbatch --array=0-3 examples/slurm/train.sh examples/elastic_digits.py
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120

# Each job of an array has its own id. A requeued job keeps its id.
export SIRTAKI_CHECKPOINT_DIR=${CHECKPOINTS:-checkpoints}/$SLURM_JOB_ID

srun python "$@"
code=$?

# 128 + SIGTERM: the ranks were signalled to end, and the last commit is on disk.
if [ $code -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
