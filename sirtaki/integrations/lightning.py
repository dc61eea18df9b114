"""Strategy for Lightning 2: DDP over Sirtaki's process group, with tuned gradient communication.

    trainer = lightning.Trainer(strategy=sirtaki.lightning.SirtakiStrategy(), accelerator="cpu", devices=4)

Importing this module also registers the strategy's names, for `Trainer(strategy="sirtaki")` and the LightningCLI's
option `--trainer.strategy=sirtaki`. Of the packages `lightning` and `pytorch_lightning`, the module uses the one that
the script has imported.
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


def _lightning(module: str) -> Any:  # Any, because Lightning is optional and may not be installed.
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(f"{name}.{module}")
        except ModuleNotFoundError as err:
            if err.name not in (name.split(".")[0], name):
                raise
    raise ModuleNotFoundError(NEEDED)


def _detect_launchers() -> None:
    """Make Lightning load MPI only in processes that mpiexec has started, and treat sirtakirun like torchrun.

    Otherwise Lightning would load and initialise MPI in each process, which takes 16 MiB of /dev/shm.
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
    """Lightning's `DDPStrategy` over the process group backend "sirtaki". Accepts the arguments of `DDPStrategy`.

    Ranks may be started by Lightning, torchrun, `sirtakirun` or mpiexec.
    """

    strategy_name = NAME

    def __init__(self, *, tuned: bool = False, process_group_backend: str = NAME, **options: Any) -> None:
        """Configure the strategy.

        Args:
            tuned: let Sirtaki (`sirtaki.torch.ddp.attach`) reduce the gradients from the first step on, and tune the
                communication. Communication hooks are not supported. If False, DDP itself reduces the gradients of the
                first step. For models that `attach` does not support, it reduces the gradients of all steps.
            process_group_backend: backend of PyTorch's process group, for gradients that DDP itself reduces, and for
                all other communication.
            options: arguments of Lightning's `DDPStrategy` and of DistributedDataParallel.

        Raises:
            ConfigError: `tuned` is True, and there is a communication hook.
        """
        if tuned and options.get("ddp_comm_hook") is not None:
            raise ConfigError(
                "SirtakiStrategy(tuned=True) cannot be used with ddp_comm_hook, because Sirtaki reduces the gradients "
                "itself; remove ddp_comm_hook, or pass tuned=False"
            )
        if options.get("cluster_environment") is None and all(os.environ.get(name) for name in _PLACE):
            # Treat sirtakirun like torchrun. It sets torchrun's variables, except the one by which Lightning detects
            # torchrun.
            options["cluster_environment"] = _lightning("plugins.environments").TorchElasticEnvironment()
        register()
        super().__init__(process_group_backend=process_group_backend, **options)
        self._tuned = tuned

    def _register_ddp_hooks(self) -> None:
        """Make Sirtaki reduce the gradients of the DDP model. Lightning calls this method after it has wrapped the
        model in DDP.
        """
        if not self._tuned:
            super()._register_ddp_hooks()
            return
        from sirtaki.torch import ddp

        ddp.attach(self.model)

    def teardown(self) -> None:
        """Shut down Sirtaki. Collective. Lightning calls this at the end of each method of the trainer."""
        from sirtaki.torch import ddp, shutdown

        if isinstance(getattr(self.model, "reducer", None), ddp.IdleReducer):
            shutdown()
        super().teardown()


if NAME not in _strategies.StrategyRegistry:
    _strategies.StrategyRegistry.register(
        NAME, SirtakiStrategy, description="DDP over Sirtaki's process group", timeout=timedelta(seconds=1800)
    )
    _strategies.StrategyRegistry.register(
        f"{NAME}_tuned", SirtakiStrategy, description="DDP whose gradients Sirtaki reduces and tunes", tuned=True
    )
