"""The control plane over direct TCP connections between all ranks, without a coordinator."""
