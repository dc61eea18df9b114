"""What carries a unit between CPU ranks: the contract, and Gloo, MPI and shared memory behind it."""
