"""A replay server: a core, in-process clients, and a socket service where it has an address."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.replay.client.client import Client
from shoal.replay.client.local_backend import LocalBackend
from shoal.replay.closing import Closing
from shoal.replay.errors import Closed, NotFound
from shoal.replay.service.checkpoint_files import newest_first, restored, save
from shoal.replay.service.keys import Key
from shoal.replay.service.socket_service import Service
from shoal.replay.table.locked_core import LockedCore
from shoal.replay.table.replay_core import Core
from shoal.replay.table.table import Table

__all__ = ["ReplayServer"]


def warm_up() -> None:
    """Compile before the first request: one that waited for the compiler would be applied after its client has given up."""
    core = Core([Table("t", max_times_sampled=1)])
    client = Client(LocalBackend(LockedCore(core), None))
    client.insert({"x": 0}, {"t": 1.0})
    client.insert_batch({"x": np.zeros(2, np.int64)}, {"t": np.ones(2)})
    keys, ones = client.sample("t").info.keys.copy(), np.ones(1)
    for array in (keys, ones):
        array.flags.writeable = False  # as arrays from a socket are
    core.update("t", keys, ones)
    core.delete("t", keys)
    core.table("t").trim()
    core.table("t").consume(keys)
    client.reset("t")
    client.close()
    core.close()


class ReplayServer(Closing):
    """Tables for clients in this process and, with an address, for those outside it.

    checkpoint_dir: the newest whole checkpoint in it is loaded, after a warning for each newer one that is damaged;
    `restore="saved"` takes the tables' configuration from it, "data" (the default) only items and counters, "none" ignores
    it. storage="memmap" keeps chunks in files.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        address: str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        key: Key | None = None,
        *,
        restore: str = "data",
        keep: int = 3,
        storage: str = "memory",
        directory: str | os.PathLike[str] | None = None,
        compression: dict[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        if restore not in ("data", "saved", "none"):
            raise ConfigError(f"restore must be 'data', 'saved' or 'none', got {restore!r}")
        if keep < 1:
            raise ConfigError(f"a server keeps at least one checkpoint, got keep={keep}")
        self.checkpoint_dir = Path(checkpoint_dir) if checkpoint_dir is not None else None
        self.keep = keep
        saved = newest_first(self.checkpoint_dir) if self.checkpoint_dir is not None and restore != "none" else []
        # A key from before a restart must not name a new item, so keys of a server that can be restarted begin at the clock.
        first_key = 1 if address is None and self.checkpoint_dir is None else time.time_ns() >> 6

        def make(settings: Sequence[Table] | None) -> Core:
            return Core(tables if settings is None else settings, storage, directory, compression, seed, first_key)

        self.core = restored(saved, restore == "saved", make) if saved else make(None)
        self._locked = LockedCore(self.core)
        self._service: Service | None = None
        self.address: str | None = None
        if address is not None:
            warm_up()
            try:
                self._service = Service(self._locked, address, key, self.checkpoint)
            except BaseException:
                self.core.close()
                raise
            self.address = self._service.address

    def client(self, timeout: float | None = None) -> Client:
        """A client in this process."""
        return Client(LocalBackend(self._locked, self.checkpoint), timeout=timeout)

    def checkpoint(self) -> Path:
        """Save all tables as of one instant."""
        if self.checkpoint_dir is None:
            raise NotFound("this server has no checkpoint_dir")
        if self._locked.closed:
            raise Closed("the replay server was closed")
        return save(self._locked, self.checkpoint_dir, self.keep)

    def info(self) -> dict[str, Any]:
        with self._locked.lock:
            return self.core.info()

    def close(self, save_last: bool = False) -> None:
        """Refuse all waiting requests and free the memory.

        save_last: save a checkpoint in between. Nothing is confirmed after it, so it holds all that was confirmed.
        """
        with self._locked.lock:
            if self._locked.closed:
                return
            self._locked.closed = True
            self._locked.changed.notify_all()
        if self._service is not None:
            self._service.close()
        try:
            if save_last and self.checkpoint_dir is not None:
                save(self._locked, self.checkpoint_dir, self.keep)
        finally:
            self.core.close()
