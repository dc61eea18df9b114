"""A strategy of Lightning 2: DDP whose process group is Sirtaki's, and whose gradients it tunes.

    trainer = lightning.Trainer(strategy=sirtaki.lightning.SirtakiStrategy(), accelerator="cpu", devices=4)

Importing this also registers names: `Trainer(strategy="sirtaki")`, and `--trainer.strategy=sirtaki` of a LightningCLI.
Both packages go, `lightning` and `pytorch_lightning`: the one that the script has imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from typing import Any

from sirtaki.engine.launchers import started_by_mpi
from sirtaki.errors import ConfigError
from sirtaki.torch_backend import NAME, register

NEEDED = "sirtaki.lightning needs Lightning 2: pip install lightning"

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _lightning(module: str) -> Any:  # Any: a package that need not be there
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(f"{name}.{module}")
        except ModuleNotFoundError as err:
            if err.name not in (name.split(".")[0], name):
                raise
    raise ModuleNotFoundError(NEEDED)


def _detect_launchers() -> None:
    """Teach Lightning to tell the launchers of a process by its environment, as far as it does not.

    Ranks of `sirtakirun` are like those of torchrun. And Lightning loads and initialises MPI to find out whether an
    mpiexec has started a process, which takes 16 MiB of /dev/shm in each process, whatever has started it.
    """
    environments = _lightning("plugins.environments")
    torchrun, mpi = environments.TorchElasticEnvironment, environments.MPIEnvironment
    is_torchrun, is_mpi = torchrun.detect, mpi.detect
    torchrun.detect = staticmethod(lambda: is_torchrun() or all(os.environ.get(name) for name in _PLACE))
    mpi.detect = staticmethod(lambda: started_by_mpi() and is_mpi())


_detect_launchers()

_strategies = _lightning("strategies")
_DDPStrategy: Any = _strategies.DDPStrategy


class SirtakiStrategy(_DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP over the backend "sirtaki"; takes what `DDPStrategy` takes.

    Ranks may be Lightning's own, or those of torchrun, `sirtakirun` or mpiexec.
    """

    strategy_name = NAME

    def __init__(self, *, tuned: bool = False, process_group_backend: str = NAME, **options: Any) -> None:
        """Starts nothing.

        Args:
            tuned: gradients are reduced by `sirtaki.torch.ddp.attach` from the first step on, where False leaves the
                first one to DDP, and all where that cannot be attached. Communication hooks do not go then.
            process_group_backend: of all else, and of gradients that are not tuned.
            options: of Lightning's `DDPStrategy` (Any: as that has them), and of PyTorch's DistributedDataParallel.

        Raises:
            ConfigError: `tuned` with a communication hook.
        """
        if tuned and options.get("ddp_comm_hook") is not None:
            raise ConfigError(
                "SirtakiStrategy(tuned=True) has a communication hook of its own; leave ddp_comm_hook out"
            )
        if options.get("cluster_environment") is None and all(os.environ.get(name) for name in _PLACE):
            # sirtakirun sets them, too, but not what Lightning knows torchrun by.
            options["cluster_environment"] = _lightning("plugins.environments").TorchElasticEnvironment()
        register()
        super().__init__(process_group_backend=process_group_backend, **options)
        self._tuned = tuned

    def _register_ddp_hooks(self) -> None:
        """Lightning calls it when the model has been wrapped."""
        if not self._tuned:
            super()._register_ddp_hooks()
            return
        from sirtaki.torch import ddp

        ddp.attach(self.model)

    def teardown(self) -> None:
        """Collective: Lightning calls it at the end of each of the trainer's methods."""
        from sirtaki.torch import ddp, shutdown

        if isinstance(getattr(self.model, "reducer", None), ddp.AtRest):
            shutdown()
        super().teardown()


if NAME not in _strategies.StrategyRegistry:
    _strategies.StrategyRegistry.register(
        NAME, SirtakiStrategy, description="DDP over Sirtaki's process group", timeout=timedelta(seconds=1800)
    )
    _strategies.StrategyRegistry.register(
        f"{NAME}_tuned", SirtakiStrategy, description="DDP whose gradients Sirtaki reduces and tunes", tuned=True
    )
