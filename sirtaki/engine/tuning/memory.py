"""Access to the registry (settings that earlier jobs found) during training. Its failures must not end training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sirtaki.engine.settings import REGISTRY_OFF
from sirtaki.errors import CorruptStoreError, RegistryError, in_a_line
from sirtaki.registry.opening import default_path, is_yet_to_be_made, load_ahead, open_store
from sirtaki.registry.schema import EntryKey, JobRecord, Key, StoredSetting
from sirtaki.registry.warm_start import JobDescription, Neighbour, neighbours

if TYPE_CHECKING:
    # Import late, because the module imports SQLAlchemy, which takes a quarter of a second.
    from sirtaki.registry.store import Store

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R", bound=StoredSetting)


def stored(record: StoredSetting, store: Store) -> str:
    """Return where a record was stored, for the log: `stored in the registry /home/me/registry.db (entry 98ce2b6d)`."""
    return f"stored in the registry {store.name} ({record.called} {record.id[:8]})"


class SettingsMemory:
    """Reads and writes the registry of settings that earlier jobs found. Only rank 0 has an instance.

    No method raises an error. The first error is logged as a warning, and the registry is then treated as empty. A
    damaged file is renamed (`registry.db.broken-1`) and replaced. If a shared registry cannot be reached, the local
    one is used.

    Each read or write opens the registry and closes it again, because a job runs much longer than its search.

    Attributes:
        name: path or URL (without password) of the registry that was opened last. "" if none was opened.
        warned: True if a warning was logged. Further problems are then logged at level DEBUG.
    """

    def __init__(self, url_or_path: str | None = None) -> None:
        """Store the registry's location. The registry is opened later.

        Args:
            url_or_path: location of the registry. None for the user's registry, `REGISTRY_OFF` for no registry.
        """
        self._url_or_path = url_or_path
        self._off = url_or_path == REGISTRY_OFF
        self.name = ""
        self.warned = False

    def entry(self, key: EntryKey) -> JobRecord | None:
        """Return the entry of a job with this key. None if there is none."""
        if self.exists and (self._url_or_path is None or "://" not in self._url_or_path):
            path = Path(self._url_or_path or default_path())
            try:
                # Import here, because some builds of Python have no sqlite3.
                from sirtaki.registry.rows import read_entry

                found = read_entry(path, key)
            except Exception:
                # The store below repairs a damaged file, and explains any other problem.
                logger.debug("the registry %s cannot be read without SQLAlchemy", path, exc_info=True)
            else:
                self.name = str(path)
                return found
        return self.read(lambda store: store.get(JobRecord, key), None)

    def load_ahead(self) -> None:
        """Import the modules for a search in the registry in a background thread, before all ranks wait for them."""
        if not self._off:
            self.guard(lambda: load_ahead(self._url_or_path), None)

    def recall(self, kind: type[_R], key: Key, wanted: object, accept: Callable[[_R], _T | None]) -> _T | None:
        """Return `accept(record)` for the stored record most similar to this job that `accept` does not reject.

        Return None if there is no such record.

        Args:
            kind: type of the records to search.
            key: key that a record must have.
            wanted: description of this job. `kind.distance` computes a record's distance to it.
            accept: converts a record to a result. Returns None to reject the record.
        """

        def first(store: Store) -> _T | None:
            accepted = map(accept, store.nearest(kind, key, wanted))
            return next((found for found in accepted if found is not None), None)

        return self.read(first, None)

    def similar(self, job: JobDescription) -> list[Neighbour]:
        """Return the registry's records of other jobs that are similar to `job`, the most similar first."""
        nothing: list[Neighbour] = []
        return self.read(lambda store: neighbours(store, job), nothing)

    def keep(self, record: StoredSetting, *, disproved: StoredSetting | None = None) -> str:
        """Store a record in the registry, and return where it was stored, in words (`stored`).

        Return "" if it was not stored because of an error, or because the registry has a better record for this job.
        The record `disproved` is replaced even if it is better.
        """
        return self.attempt(lambda store: stored(record, store) if store.put(record, disproved=disproved) else "", "")

    @property
    def exists(self) -> bool:
        """Return whether there is a registry that can be read."""
        return not (self._off or is_yet_to_be_made(self._url_or_path))

    def read(self, action: Callable[[Store], _T], otherwise: _T) -> _T:
        """Run `action` on the opened registry, and return its result.

        Return `otherwise` if there is no registry yet, or if `action` fails.
        """
        return self.attempt(action, otherwise) if self.exists else otherwise

    def attempt(self, action: Callable[[Store], _T], otherwise: _T) -> _T:
        """Run `action` on the opened registry, which is created if it does not exist, and return its result.

        Return `otherwise` if `action` fails.
        """
        return otherwise if self._off else self.guard(lambda: self._run(action), otherwise)

    def guard(self, action: Callable[[], _T], otherwise: _T) -> _T:
        """Return the result of `action`, or `otherwise` if it raises an error, which is logged."""
        try:
            return action()
        except Exception as err:
            self._warn("training goes on without the registry: %s", err)
            return otherwise

    def _run(self, action: Callable[[Store], _T]) -> _T:
        try:
            store = self._open()
            self.name = store.name
        except Exception:
            self._off = True  # Do not try again, because each attempt could wait for a server or a lock.
            raise
        try:
            return action(store)
        except CorruptStoreError as err:
            store.close()
            store = self._replace(err)
            return action(store)
        finally:
            store.close()

    def _warn(self, message: str, err: Exception, *values: object) -> None:
        cause = str(err) if isinstance(err, RegistryError) else in_a_line(err)
        logger.log(logging.DEBUG if self.warned else logging.WARNING, message, cause, *values)
        logger.debug("caused by", exc_info=err)
        self.warned = True

    def _replace(self, err: CorruptStoreError) -> Store:
        from sirtaki.registry.store import set_aside

        assert err.path is not None
        logger.warning(
            "the registry of tuning results is damaged: %s; Sirtaki renamed its file to %s and creates a new registry",
            err,
            set_aside(err.path),
        )
        self.warned = True
        return open_store(str(err.path))

    def _open(self) -> Store:
        try:
            return open_store(self._url_or_path)
        except CorruptStoreError as err:
            return self._replace(err)
        except RegistryError as err:
            if self._url_or_path is None or "://" not in self._url_or_path:
                raise
            self._warn(
                "the registry of tuning results in SIRTAKI_REGISTRY cannot be used: %s; Sirtaki uses the local "
                "registry %s for this job (`sirtaki registry export` and `import` copy entries between registries)",
                err,
                default_path(),
            )
            self._url_or_path = None
            return open_store(None)
