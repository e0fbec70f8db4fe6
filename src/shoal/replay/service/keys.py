"""CURVE keys: who a server is, and which clients it lets in. Made by `shoal replay keys`, or by `Key.generate`.

    DIR/server.json    the server's pair, and the public keys of its clients
       /NAME.json      a client's pair, and the server's public key: copy it to where the client runs

The files hold secrets: only their owner may read them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.z85

from shoal.errors import ConfigError

__all__ = ["Key", "add_client", "check_key"]

CHARACTERS = 40
SERVER_FILE = "server.json"


class Key:
    """CURVE keys: of a server (with the public keys of the clients it lets in) or of a client (with the server's)."""

    def __init__(
        self, public: bytes | str, secret: bytes | str, server: bytes | str | None = None, clients: Sequence[bytes | str] = ()
    ) -> None:
        self.public, self.secret = _checked("public", public), _checked("secret", secret)
        self.server = None if server is None else _checked("server's", server)
        self.clients = frozenset(_checked("client's", client) for client in clients)

    @classmethod
    def generate(cls, server: bytes | str | None = None, clients: Sequence[bytes | str] = ()) -> Key:
        """A new pair; a client passes the server's public key, a server those of its clients."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret, server, clients)

    def allowing(self, *clients: bytes | str) -> Key:
        """The same pair with these clients let in."""
        return Key(self.public, self.secret, self.server, clients)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that only its owner can read."""
        data: dict[str, Any] = {"public": self.public.decode(), "secret": self.secret.decode()}
        if self.server is not None:
            data["server"] = self.server.decode()
        if self.clients:
            data["clients"] = sorted(client.decode() for client in self.clients)
        draft = Path(f"{os.fspath(path)}.{os.getpid()}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(data, file, indent=2)
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ConfigError(f"the key cannot be written to {os.fspath(path)}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Key:
        """A key from a file that `save` wrote."""
        where = os.fspath(path)
        try:
            data = json.loads(Path(path).read_text())
            return cls(data["public"], data["secret"], data.get("server"), data.get("clients", ()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{where} is not a key file ({why}); `shoal replay keys DIR` makes one") from error


def check_key(owner: str, key: Any, loopback: bool, address: str) -> None:
    """Refuse what is not a key, and none where the address is off loopback. The owner is a "server" or a "client"."""
    if key is not None and not isinstance(key, Key):
        raise ConfigError(f"a {owner}'s key is a replay.Key, not {type(key).__name__}")
    if key is None and not loopback:
        raise ConfigError(
            f"{address} is not loopback: give the {owner} a key made by `shoal replay keys DIR` (--key DIR/{owner}.json), "
            "or by replay.Key.generate"
        )


def add_client(directory: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
    """A new client of the server whose key lies in a directory (made where it is not there); returns both files."""
    folder = Path(directory)
    server_file, client_file = folder / SERVER_FILE, folder / f"{name}.json"
    if not name or not name.replace("-", "").replace("_", "").isalnum() or client_file == server_file:
        raise ConfigError(f"a client's name has letters, digits, - and _ only, and is not 'server'; got {name!r}")
    if client_file.exists():
        raise ConfigError(f"{client_file} is there already: choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}") from error
    server = Key.load(server_file) if server_file.exists() else Key.generate()
    client = Key.generate(server=server.public)
    client.save(client_file)
    server.allowing(*server.clients, client.public).save(server_file)
    return server_file, client_file


def _checked(name: str, value: Any) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    if not isinstance(raw, bytes) or len(raw) != CHARACTERS:
        length = len(raw) if isinstance(raw, bytes) else type(value).__name__
        raise ConfigError(f"the {name} key must be {CHARACTERS} Z85 characters, got {length}")
    try:
        zmq.utils.z85.decode(raw)
    except (KeyError, struct.error):
        raise ConfigError(f"the {name} key is not of Z85 characters") from None
    return raw
