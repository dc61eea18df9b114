"""What a rank loads before it joins a job that runs, which stands still until the rank has synchronised."""

import sys


def load_what_training_needs() -> None:
    """Loads what PyTorch loads with the first optimizer only, and takes as long as PyTorch itself; again is harmless.

    Does nothing where PyTorch is not loaded.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
