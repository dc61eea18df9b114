"""Transports between CPU ranks, over Gloo, MPI and shared memory, and their common interface."""
