#!/bin/bash
# One torchrun per node, for scripts that call torch.distributed.init_process_group().
#   sbatch examples/slurm/torchrun.sh examples/ddp_attached.py
#SBATCH --job-name=torchrun
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

ranks_per_node=${RANKS_PER_NODE:-2}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks_per_node" --rdzv-backend c10d \
    --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" "$@"
