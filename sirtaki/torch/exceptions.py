"""Horovod's exceptions under Horovod's names."""

from sirtaki.errors import CommError

HorovodInternalError = CommError
"""Communication failed: inside `elastic.run`, where ranks come and go, training goes on; elsewhere the job ends."""


class HostsUpdatedInterrupt(Exception):
    """Hosts have come or gone; raised on all ranks at once, where ranks come and go.

    Attributes:
        skip_sync: the state need not be synchronised before training goes on.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Parts of Horovod of different versions; never raised here, since there are no parts to build."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """What `HorovodVersionMismatchError` says."""
    return f"Framework {name} installed with version {installed_version} but found version {version}."
