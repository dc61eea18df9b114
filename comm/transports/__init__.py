"""Transports over Gloo, MPI and shared memory, staging of GPU buffers, and the interface of all transports."""
