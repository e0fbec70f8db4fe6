"""A replay server: a core, in-process clients, and a socket service where it has an address."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.replay.checkpoint import load, newest, save
from shoal.replay.client import Client, LocalBackend
from shoal.replay.core import Core
from shoal.replay.errors import Closed, NotFound
from shoal.replay.local import Local
from shoal.replay.table import Table

__all__ = ["Server"]


def warm_up() -> None:
    """Compile before anybody asks: a request that waited for the compiler would be applied after its client has given up."""
    core = Core([Table("t", max_times_sampled=1)])
    client = Client(LocalBackend(Local(core), None))
    client.insert({"x": 0}, {"t": 1.0})
    client.insert_batch({"x": np.zeros(2, np.int64)}, {"t": np.ones(2)})
    keys, ones = client.sample("t").info.keys.copy(), np.ones(1)
    for array in (keys, ones):
        array.flags.writeable = False  # as they come from a socket
    core.update("t", keys, ones)
    core.delete("t", keys)
    core.table("t").trim()
    core.table("t").consume(keys)
    client.reset("t")
    client.close()
    core.close()


class Server:
    """Tables for clients in this process and, with an address, for those outside it.

    checkpoint_dir: the newest whole checkpoint in it is loaded; `restore="saved"` takes the tables' configuration from it,
    "data" (the default) only items and counters, "none" ignores it. storage="memmap" keeps chunks in files.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        address: str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        key: Any = None,
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
        saved = newest(self.checkpoint_dir) if self.checkpoint_dir is not None and restore != "none" else None
        if saved is not None and restore == "saved":
            from shoal.replay.checkpoint import saved_tables

            tables = saved_tables(saved)
        # Keys of an earlier life must not name new items, so those of a server that can be restarted begin at the clock.
        first_key = 1 if address is None and self.checkpoint_dir is None else time.time_ns() >> 6
        self.core = Core(tables, storage, directory, compression, seed, first_key)
        if saved is not None:
            try:
                load(self.core, saved)
            except BaseException:
                self.core.close()
                raise
        self._local = Local(self.core)
        self._service: Any = None
        self.address: str | None = None
        if address is not None:
            from shoal.replay.service import Service

            warm_up()
            try:
                self._service = Service(self._local, address, key, self.checkpoint)
            except BaseException:
                self.core.close()
                raise
            self.address = self._service.address

    def client(self, timeout: float | None = None) -> Client:
        """A client in this process."""
        return Client(LocalBackend(self._local, self.checkpoint), timeout=timeout)

    def checkpoint(self) -> Path:
        """Save all tables as of one instant."""
        if self.checkpoint_dir is None:
            raise NotFound("this server has no checkpoint_dir")
        if self._local.closed:
            raise Closed("the replay server was closed")
        return save(self._local, self.checkpoint_dir, self.keep)

    def info(self) -> dict[str, Any]:
        with self._local.lock:
            return self.core.info()

    def close(self, save_last: bool = False) -> None:
        """Wake and refuse whoever waits, then let go of the memory.

        save_last: with a last checkpoint in between. Nothing is confirmed after it, so it holds all that was.
        """
        with self._local.lock:
            if self._local.closed:
                return
            self._local.closed = True
            self._local.changed.notify_all()
        if self._service is not None:
            self._service.close()
        try:
            if save_last and self.checkpoint_dir is not None:
                save(self._local, self.checkpoint_dir, self.keep)
        finally:
            self.core.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
