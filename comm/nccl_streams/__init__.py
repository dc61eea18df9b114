"""Transport over NCCL: a pool of communicators whose operations run on separate CUDA streams."""
