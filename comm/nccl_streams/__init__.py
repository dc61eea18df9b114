"""CUDA: NCCL communicators on their own CUDA streams, and staging through pinned memory."""
