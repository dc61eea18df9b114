"""Start scripts of other packages over Sirtaki, with every launcher."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

PROGRAMS = Path(sys.executable).parent

LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "sirtakirun": (str(PROGRAMS / "sirtakirun"), "-np", "2", "--no-prefix", sys.executable),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
    "accelerate": (  # whose only way to several CPU processes is an mpirun
        *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mpirun_hostfile", "hosts", "--mixed_precision", "no", "--dynamo_backend", "no"),
    ),
    "itself": (sys.executable,),
}


ABORTED_BY_PYTORCH = "terminate called without an active exception"
"""Message of a crash at Python's exit, after the script. It occurred once with PyTorch's Gloo alone, in 76 runs."""


def losses(
    launcher: str, script: str, *args: object, folder: Path, timeout_s: float = 200.0, over_sirtaki: bool = True
) -> dict[int, float]:
    """Run a script in `folder`. Return the printed losses by epoch or step."""
    (folder / "hosts").write_text("localhost slots=2\n")
    job = subprocess.run(
        [*LAUNCHERS[launcher], str(EXAMPLES / script), *map(str, args)],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SIRTAKI_REGISTRY": "off",
            "SIRTAKI_WARMUP_ITERATIONS": "26",
            "HF_HUB_OFFLINE": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PATH": os.pathsep.join((str(PROGRAMS), os.environ["PATH"])),
            "PYTHONPATH": str(EXAMPLES.parent),
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    ended = job.returncode == 0 or (not over_sirtaki and ABORTED_BY_PYTORCH in job.stderr)
    assert ended, f"{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
    return {int(number): float(loss) for number, loss in re.findall(r"(?:epoch|step) (\d+): loss ([\d.]+)", job.stdout)}
