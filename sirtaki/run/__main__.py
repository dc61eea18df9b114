"""Entry point of `sirtakirun` and `python -m sirtaki.run`, which launch the ranks of a job."""

import subprocess
import sys
from pathlib import Path

from sirtaki.errors import ConfigError, LaunchError
from sirtaki.machine import explained
from sirtaki.run.elastic.driver import launch_elastic

from .launch import launch
from .options import arguments_from_file, is_elastic, option_names, parse
from .output import open_standard_streams, say


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher.

    Returns:
        0; the exit code of the failed rank; 2 for invalid options; 1 if ranks could not be started; 128 + the signal
            that ended the launcher.
    """
    open_standard_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = parse(arguments)
        if options.check_build:
            return subprocess.call([sys.executable, "-P", "-m", "sirtaki.cli", "doctor"])
        if options.config_file:
            from_file = arguments_from_file(Path(options.config_file), option_names())
            options = parse([*from_file, *arguments])
        return launch_elastic(options) if is_elastic(options) else launch(options)
    except (ConfigError, LaunchError) as err:
        say(str(err))
        return 2 if isinstance(err, ConfigError) else 1
    except (OSError, RuntimeError, MemoryError) as err:
        if (text := explained(err)) == str(err):
            raise
        say(f"the job could not be started: {text}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
