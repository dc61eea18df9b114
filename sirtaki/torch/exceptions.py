"""Horovod's exceptions under Horovod's names."""

from sirtaki.errors import CommError

from .elastic.state import HostsUpdatedInterrupt as HostsUpdatedInterrupt

HorovodInternalError = CommError
"""Communication failed: inside `elastic.run`, where ranks come and go, training goes on; elsewhere the job ends."""


class HorovodVersionMismatchError(ImportError):
    """Parts of Horovod of different versions; never raised here, since there are no parts to build."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """What `HorovodVersionMismatchError` says."""
    return f"Framework {name} installed with version {installed_version} but found version {version}."
