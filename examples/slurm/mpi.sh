#!/bin/bash
# Ranks over the cluster's own MPI. Slurm must support PMIx (`srun --mpi=list`).
#   sbatch examples/slurm/mpi.sh examples/digits.py
#SBATCH --job-name=mpi
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2

srun --mpi=pmix python "$@"
