"""Horovod's exceptions under Horovod's names."""

from sirtaki.errors import CommError

from .elastic.state import HostsUpdatedInterrupt as HostsUpdatedInterrupt

HorovodInternalError = CommError
"""Error that is raised if communication fails, for example because a rank is lost. `elastic.run` catches it and
continues training. Elsewhere it ends the job.
"""


class HorovodVersionMismatchError(ImportError):
    """Error that Horovod raises if its compiled parts have different versions.

    Exists for compatibility: Sirtaki never raises it.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message of `HorovodVersionMismatchError`."""
    return f"Framework {name} installed with version {installed_version} but found version {version}."
