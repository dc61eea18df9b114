"""Transport over NCCL: all-reduces by several communicators, whose operations run on separate CUDA streams."""
