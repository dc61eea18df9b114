"""Horovod's exceptions, as scripts catch them."""

import sirtaki.torch as hvd
from sirtaki.errors import CommError, MismatchError, PeerLostError, StallError
from sirtaki.torch.exceptions import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    get_version_mismatch_message,
)


def test_failed_communication_is_horovods_internal_error() -> None:
    assert HorovodInternalError is CommError
    assert hvd.mpi_ops.HorovodInternalError is HorovodInternalError
    for cls in (MismatchError, PeerLostError, StallError):
        assert issubclass(cls, HorovodInternalError)


def test_an_interrupt_says_whether_to_synchronise() -> None:
    assert not HostsUpdatedInterrupt().skip_sync
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync
    assert not issubclass(HostsUpdatedInterrupt, HorovodInternalError)


def test_a_version_that_does_not_fit_names_both() -> None:
    error = HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "1.0", "2.0")
    assert str(error) == get_version_mismatch_message("torch", "1.0", "2.0")
    assert str(error) == "Framework torch installed with version 2.0 but found version 1.0."
