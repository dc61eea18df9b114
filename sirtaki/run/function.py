"""`run`: call a function on every rank of a new job, like `horovod.run`.

Each rank runs `python -m sirtaki.run.function FOLDER`, which reads the pickled call from FOLDER and executes it.
"""

import importlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sirtaki.errors import ConfigError, LaunchError

_CALL = "call.pickle"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on every rank of a new job. Blocks until all ranks have returned.

    Function, arguments and results are pickled into a temporary folder, with cloudpickle if it is installed (which
    supports lambdas and functions of `__main__`). With ranks on other hosts, TMPDIR must be on a shared file system.
    Names, order and defaults of the arguments are those of `horovod.run`. `disable_cache`, `use_gloo` and `use_mpi`
    have no effect. Elastic arguments are rejected.

    Returns:
        The return value of each rank, in rank order.

    Raises:
        ConfigError: an argument is invalid.
        LaunchError: the ranks could not be started, or a rank failed. The traceback of the failed rank is in the
            output.
    """
    # Imported only here, because ranks also import this module and do not need the launcher.
    from .launch import launch
    from .options import parse

    del disable_cache, use_gloo, use_mpi
    elastic = (min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script, min_np, max_np)
    if any(value is not None for value in elastic):
        raise ConfigError(
            "run() starts a fixed number of ranks and accepts no elastic arguments; start elastic jobs with "
            "`sirtakirun --min-np`"
        )
    ranks = np or num_proc
    options = {
        "-np": ranks,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": network_interfaces or network_interface,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    words += ["--verbose"] if verbose else []
    words += [f"--mpi-args={mpi_args}"] if mpi_args else []
    with tempfile.TemporaryDirectory(prefix="sirtaki-run-") as folder:
        (Path(folder) / _CALL).write_bytes(_pickler().dumps((func, tuple(args), dict(kwargs or {}))))
        command = [executable or sys.executable, "-m", "sirtaki.run.function", folder]
        exit_code = launch(parse([*words, "--", *command]))
        if exit_code != 0:
            raise LaunchError(f"a rank failed with exit code {exit_code}; its traceback is in the output above")
        results = []
        for rank in range(ranks):
            try:
                results.append(pickle.loads((Path(folder) / f"result.{rank}").read_bytes()))
            except OSError as err:
                raise LaunchError(
                    f"rank {rank} has written no result to the folder {folder}; if ranks run on several hosts, set "
                    "TMPDIR to a folder that all hosts share"
                ) from err
        return results


def answer_call(folder: Path, rank: int) -> None:
    """Read the pickled call from `folder`, execute it on this rank, and write the pickled result."""
    func, args, kwargs = pickle.loads((folder / _CALL).read_bytes())
    result = func(*args, **kwargs)
    (folder / f"result.{rank}").write_bytes(_pickler().dumps(result))


def _pickler() -> ModuleType:
    """Return the module that pickles the call and its result: cloudpickle if it is installed, otherwise pickle. pickle
    can read what cloudpickle has written.
    """
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


if __name__ == "__main__":
    answer_call(Path(sys.argv[1]), int(os.environ["HOROVOD_RANK"]))
