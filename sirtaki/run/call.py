"""What the ranks of `sirtaki.run.run` execute: `python -m sirtaki.run.call FOLDER`."""

import os
import sys
from pathlib import Path

from .call_folder import answer_call

if __name__ == "__main__":
    answer_call(Path(sys.argv[1]), int(os.environ["HOROVOD_RANK"]))
