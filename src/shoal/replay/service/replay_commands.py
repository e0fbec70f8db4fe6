"""`shoal replay serve`, `shoal replay info` and `shoal replay keys`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, ShoalError
from shoal.replay.client.client import Client
from shoal.replay.service.checkpoint_files import check_writable
from shoal.replay.service.keys import Key, add_client
from shoal.replay.service.server import ReplayServer
from shoal.replay.table.limiters import MinSize
from shoal.replay.table.selectors import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Selector, Uniform
from shoal.replay.table.table import Table

__all__ = ["info_command", "keys_command", "parse_table", "serve_command"]

LONGEST_SECONDS = 1e9
SELECTORS: dict[str, type[Selector]] = {
    "fifo": Fifo, "lifo": Lifo, "uniform": Uniform, "prioritized": Prioritized, "minheap": MinHeap, "maxheap": MaxHeap,
}  # fmt: skip


def parse_table(text: str) -> Table:
    """A table from NAME:SELECTOR[=EXPONENT]:MAX_SIZE[:MIN_SIZE], or NAME:queue:MAX_SIZE, NAME:stack:MAX_SIZE."""
    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise ConfigError(f"a table is NAME:SELECTOR[=EXPONENT]:MAX_SIZE[:MIN_SIZE], got {text!r}")
    name, kind, exponent = parts[0], *[*parts[1].split("=", 1), ""][:2]
    try:
        sizes = [int(part.replace("_", "")) for part in parts[2:]]
        power = float(exponent) if exponent else 0.6
    except ValueError:
        raise ConfigError(f"{text!r}: MAX_SIZE, MIN_SIZE and EXPONENT must be numbers") from None
    if exponent and kind != "prioritized":
        raise ConfigError(f"{text!r}: selector {kind} has no exponent; only prioritized=EXPONENT has one")
    if kind in ("queue", "stack"):
        if len(sizes) > 1:
            raise ConfigError(f"a {kind} is {name}:{kind}:MAX_SIZE without a MIN_SIZE, got {text!r}")
        return Table.queue(name, sizes[0]) if kind == "queue" else Table.stack(name, sizes[0])
    if kind not in SELECTORS:
        raise ConfigError(f"unknown selector {kind!r} in {text!r}; choose from {sorted(SELECTORS)}, queue, stack")
    selector = Prioritized(power) if kind == "prioritized" else SELECTORS[kind]()
    return Table(name, selector, max_size=sizes[0], limiter=MinSize(sizes[1] if len(sizes) > 1 else 1))


def serve_command(argv: Sequence[str]) -> int:
    """Serve tables until SIGINT, SIGTERM or a closed terminal, then save a last checkpoint if there is a --checkpoint-dir."""
    parser = argparse.ArgumentParser(prog="shoal replay serve", description=serve_command.__doc__)
    parser.add_argument("--table", action="append", required=True, help=parse_table.__doc__)
    parser.add_argument("--address", default="tcp://127.0.0.1:0", help="tcp://HOST:PORT or ipc://PATH")
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="load the newest whole checkpoint in DIR, and save new ones there")
    parser.add_argument("--checkpoint-seconds", type=float, default=0.0, help="save every N seconds (default 0: only at the end)")
    parser.add_argument("--restore", choices=["data", "saved", "none"], default="data",
                        help="take items and counters from the checkpoint (data), the tables' settings too (saved), or nothing")
    parser.add_argument("--storage", choices=["memory", "memmap"], default="memory", help="keep chunks in memory or in files")
    parser.add_argument("--directory", help="folder for the files of --storage memmap (default: the system's temporary folder)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    parser.add_argument("--key", metavar="FILE", help="the server's key, for addresses off loopback: see `shoal replay keys`")
    chosen = parser.parse_args(argv)
    if not 0 <= chosen.checkpoint_seconds < LONGEST_SECONDS or (chosen.checkpoint_seconds and not chosen.checkpoint_dir):
        parser.error("--checkpoint-seconds is a positive number and needs --checkpoint-dir DIR")
    try:
        if chosen.checkpoint_dir is not None:
            check_writable(Path(chosen.checkpoint_dir))
        server = ReplayServer(
            [parse_table(text) for text in chosen.table], chosen.address, chosen.checkpoint_dir,
            Key.load(chosen.key) if chosen.key else None, restore=chosen.restore, storage=chosen.storage,
            directory=chosen.directory, seed=chosen.seed,
        )  # fmt: skip
    except ShoalError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup it goes on
            signal.signal(number, lambda *_: stop.set())
    sys.stdout.write(f"serving {server.address}\n")
    sys.stdout.flush()
    while not stop.wait(chosen.checkpoint_seconds or None):
        try:
            server.checkpoint()
        except ShoalError as error:  # such as a full disk: keep serving
            sys.stderr.write(f"{error}\n")
    try:
        server.close(save_last=True)
    except ShoalError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def info_command(argv: Sequence[str]) -> int:
    """Print the tables of a running server."""
    parser = argparse.ArgumentParser(prog="shoal replay info", description=info_command.__doc__)
    parser.add_argument("address", help="tcp://HOST:PORT or ipc://PATH, as `shoal replay serve` prints it")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="how long to wait for an answer (default 5)")
    parser.add_argument("--key", metavar="FILE", help="a client's key, for addresses off loopback: see `shoal replay keys`")
    chosen = parser.parse_args(argv)
    if not 0 <= chosen.timeout < LONGEST_SECONDS:
        parser.error(f"--timeout is a number of seconds, 0 or more, got {chosen.timeout}")
    try:
        with Client(chosen.address, Key.load(chosen.key) if chosen.key else None, chosen.timeout) as client:
            info = client.info()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ShoalError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(render(info))
    return 0


def keys_command(argv: Sequence[str]) -> int:
    """Make a key for a client. The first call also makes the server's, DIR/server.json, which lets in every client made here."""
    parser = argparse.ArgumentParser(prog="shoal replay keys", description=keys_command.__doc__)
    parser.add_argument("directory")
    parser.add_argument("--client", default="client", metavar="NAME",
                        help="write its key to DIR/NAME.json; copy that file to where the client runs")
    chosen = parser.parse_args(argv)
    try:
        server, client = add_client(chosen.directory, chosen.client)
    except ShoalError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{server}\n{client}\n")
    return 0


def render(info: dict[str, Any]) -> str:
    """The report of a server as text."""
    lines = [
        f"up {info['seconds']:.0f} s, {info['chunks']} chunks, {info['stored_bytes'] / 1e6:.1f} MB stored, "
        f"{info['writers']} writers, {info['lost']} items lost"
    ]
    for name, table in info["tables"].items():
        limiter = table["limiter"]
        ratio = table["samples"] / table["inserts"] if table["inserts"] else 0.0
        drift = table["inserts"] * limiter["samples_per_insert"] - table["samples"]
        lines += [
            f"{name}",
            f"  size               {table['size']} of {table['max_size']}",
            f"  bytes              {table['bytes']}" + (f" of {table['max_bytes']}" if table["max_bytes"] else ""),
            f"  inserts            {table['inserts']} ({table['inserts_per_second']:.1f}/s)",
            f"  samples            {table['samples']} ({table['samples_per_second']:.1f}/s)",
            f"  samples per insert {ratio:.3f} (target {limiter['samples_per_insert']:g}; "
            f"ahead by {drift:g} in [{limiter['min_diff']:g}, {limiter['max_diff']:g}])",
            f"  blocked            insert {table['insert_blocked_seconds']:.2f} s, "
            f"sample {table['sample_blocked_seconds']:.2f} s",
            "  age                " + _spread(table["age_seconds"], " s"),
            "  priority           " + _spread(table["priorities"], ""),
        ]
    return "\n".join(lines) + "\n"


def _spread(values: dict[str, float], unit: str) -> str:
    return f"min {values['min']:.4g}{unit}, mean {values['mean']:.4g}{unit}, max {values['max']:.4g}{unit}"
