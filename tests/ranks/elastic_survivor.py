"""`elastic_member.py` under `mpiexec --with-ft ulfm`: `elastic_survivor.py FOLDER PLAN`; workers are MPI's ranks."""

import os
import sys
from pathlib import Path

from ranks import elastic_member

from sirtaki.engine.generations import open_survivors, register
from sirtaki.engine.settings import Settings

if __name__ == "__main__":
    there = open_survivors(Settings.from_environ())
    assert there is not None
    worker = int(os.environ["OMPI_COMM_WORLD_RANK"])
    register(lambda: there)
    elastic_member.play(there, worker, elastic_member.Log(Path(sys.argv[1]) / f"{worker}.log"))
