"""The Ray actor that a place is: its roles' loop in one thread, its post and its talk with the driver in others.

    live      the loop, from birth to end; what it returns are the last words
    deliver   a call of another place's post
    tell      the supervisor's words: commands for the roles, members of wires, where other places are
    listen    what the place has to say since the last time: answers, counters, its log, files of a checkpoint
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import numpy as np
import ray

from shoal.runtime.place import Birth, PlaceProcess, report, run_place
from shoal.runtime.ray.fabric import Fabric
from shoal.runtime.ray.post import Message, Post

__all__ = ["LOG", "Host", "scratch", "sweep", "tail"]

LOG = "log"
LOG_BYTES = 1 << 18       # of it in one report
LAST_BYTES = 1 << 24      # of it at the end; of more than this its last part
SWITCH_SECONDS = 0.001    # between the role's thread and the others; Python's own 5 ms would be added to every message


def scratch(session: str, life: str = "") -> Path:
    """Where the places of a run keep files on their own node: a log until the driver has it, checkpoints on their way."""
    return Path(tempfile.gettempdir()) / f"shoal-{session}" / life


class Voice:
    """A place's end of its talk with the driver (place.Voice)."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._heard: deque[dict[str, Any]] = deque()
        self._said: list[dict[str, Any]] = []
        self._files: dict[str, np.ndarray] = {}
        self._spoken = threading.Condition()

    def send(self, message: dict[str, Any]) -> None:
        with self._spoken:
            self._said.append(message)
            self._spoken.notify()

    def ship(self, path: str, data: np.ndarray) -> None:
        """A file that the driver is to write."""
        with self._spoken:
            self._files[path] = data

    def receive(self) -> dict[str, Any] | None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return self._heard.popleft() if self._heard else None

    def hear(self, messages: list[dict[str, Any]]) -> None:
        self._heard.extend(messages)
        os.eventfd_write(self.fd, 1)

    def gather(self, seconds: float) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
        """What was said; waits at most `seconds` for something."""
        with self._spoken:
            if not self._said:
                self._spoken.wait(seconds)
            said, files = self._said, self._files
            self._said, self._files = [], {}
        return said, files


class Freight:
    """A store whose files lie with the driver: what is saved here is shipped there, what is loaded came from there."""

    def __init__(self, store: Any, voice: Voice, folder: Path) -> None:
        self._store, self._voice, self._folder = store, voice, folder

    def save(self, path: Path, state: Any) -> None:
        own = self._folder / path.name
        try:
            self._store.save(own, state)
            self._voice.ship(str(path), np.fromfile(own, np.uint8))
        finally:
            own.unlink(missing_ok=True)

    def load(self, path: Path) -> Any:
        return self._store.load(path)


def unpack(folder: Path, files: dict[str, Any]) -> None:
    """Files of the driver, written where a store can read them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        np.asarray(data).tofile(folder / name)


class Host:
    def __init__(self, session: str, place: str, incarnation: int) -> None:
        self._place, self._incarnation = place, incarnation
        self._folder = scratch(session, f"{place}-{incarnation}")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._node, self._address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._voice = Voice()
        self._post = Post(place, incarnation, self._receive)
        self._fabric: Fabric | None = None
        self._early: list[tuple[Message, Any]] = []  # what came before the wires were laid out
        self._early_words: list[Any] = []
        self._lock = threading.Lock()
        self._pages: dict[str, np.ndarray] = {}
        self._logged = 0
        self._reading = threading.Lock()

    # ------------------------------------------------------------------ the loop
    def live(self, order: dict[str, Any], program: bytes) -> dict[str, Any]:
        """Bring the place to life and drive it until its end."""
        self._write_log()
        births = [Birth(**birth) for birth in order["births"]]
        try:
            process = self._prepare(order, program)
        except BaseException as failure:
            report(self._voice, f"{births[0].node}-{births[0].index}", failure)
            return self._last_words(1)
        code = run_place(process, self._voice, self._with_files(births, order["files"]))
        return self._last_words(code)

    def _prepare(self, order: dict[str, Any], blob: bytes) -> PlaceProcess:
        type(self).__name__ = order["title"]  # after every call Ray names the process by its actor's class
        sys.setswitchinterval(SWITCH_SECONDS)
        os.environ["OMP_NUM_THREADS"] = str(order["threads"])  # for a torch that is imported from now on
        sys.path.extend(path for path in order["paths"] if path not in sys.path)
        program = cloudpickle.loads(blob)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(order["threads"])
        program.store = Freight(program.store, self._voice, self._folder) if program.store is not None else None
        fabric = Fabric(program, self._place, self._address, self._post.send)
        process = PlaceProcess(program, self._place, self._voice)
        fabric.medium.wake = process.rouse
        for name, page in order["pages"].items():
            node, index = name.rsplit("-", 1)
            self._pages[name] = program.page(node, int(index))
            self._pages[name][:] = page
        self._connect(order["peers"])
        with self._lock:
            self._fabric = fabric
            fabric.told(order["words"])
            fabric.told(self._early_words)
            early, self._early = self._early, []
            for message, payload in early:
                fabric.receive(message, payload)
        if self._incarnation > 0:
            fabric.await_greetings()
        return process

    def _with_files(self, births: list[Birth], files: dict[str, Any]) -> list[Birth]:
        """Births that begin from a checkpoint find their files on this node."""
        if not files:
            return births
        folder = self._folder / "newest"
        unpack(folder, files)
        return [Birth(b.node, b.index, b.incarnation, str(folder) if b.newest else None, b.wishes) for b in births]

    def _write_log(self) -> None:
        fd = os.open(self._folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for target in (1, 2):
            os.dup2(fd, target)
        os.close(fd)
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = os.fdopen(os.dup(number), "w", buffering=1)
            setattr(sys, name, stream)
        faulthandler.enable(sys.stderr)  # a crash in native code leaves its stack there

    def _last_words(self, code: int) -> dict[str, Any]:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        last = {**self._report(0.0, whole=True), "code": code}
        shutil.rmtree(self._folder, ignore_errors=True)
        return last

    # ------------------------------------------------------------------ the post
    def deliver(self, sender: str, incarnation: int, number: int, headers: list[Any], *payloads: Any) -> None:
        self._post.arrive(sender, incarnation, number, headers, payloads)

    def _receive(self, message: Message, payload: Any) -> None:
        fabric = self._fabric
        if fabric is None:
            with self._lock:
                if self._fabric is None:
                    self._early.append((message, payload))
                    return
                fabric = self._fabric
        fabric.receive(message, payload)

    # ------------------------------------------------------------------ the driver's
    def tell(self, messages: list[dict[str, Any]], words: list[Any], peers: dict[str, Any]) -> None:
        self._connect(peers)
        if words:
            with self._lock:
                if self._fabric is None:
                    self._early_words += words
                else:
                    self._fabric.told(words)
        for message in messages:
            if message["op"] == "load":
                unpack(self._folder, message.pop("files"))
                message["arguments"]["path"] = str(self._folder / Path(message["arguments"]["path"]).name)
            elif message["op"] == "start":
                self._seed(message)
        if messages:
            self._voice.hear(messages)

    def _seed(self, message: dict[str, Any]) -> None:
        """An instance that begins in a living place goes on with the counters and the state that the driver has."""
        assert self._fabric is not None
        arguments = message["arguments"]
        if files := message.pop("files"):
            unpack(self._folder / "newest", files)
            arguments["newest"] = str(self._folder / "newest")
        page = self._pages[message["to"]] = self._fabric.program.page(arguments["node"], arguments["index"])
        page[:] = message.pop("page")

    def _connect(self, peers: dict[str, Any]) -> None:
        for place, (handle, incarnation) in peers.items():
            self._post.connect(place, handle, incarnation)

    def listen(self, seconds: float) -> dict[str, Any]:
        return self._report(seconds)

    def _report(self, seconds: float, whole: bool = False) -> dict[str, Any]:
        said, files = self._voice.gather(seconds)
        fabric = self._fabric
        return {"said": said, "files": files, "log": self._read_log(whole), "node": self._node, "pid": os.getpid(),
                "address": self._address,
                "pages": {name: page.copy() for name, page in self._pages.items()},
                "wires": fabric.numbers() if fabric is not None else {}, "post": (self._post.calls, self._post.bytes)}

    def _read_log(self, whole: bool) -> bytes:
        """What was written since the last time: some of it, or to the end."""
        with self._reading, contextlib.suppress(OSError), open(self._folder / LOG, "rb") as file:  # its end may be told meanwhile
            if whole:
                text = rest(file, self._logged)
            else:
                file.seek(self._logged)
                text = file.read(LOG_BYTES)
            self._logged = file.tell()
            return text
        return b""


def rest(file: BinaryIO, offset: int) -> bytes:
    """A log from here to its end; of a very long one the last part, with a word on what is left out."""
    left = os.fstat(file.fileno()).st_size - offset - LAST_BYTES
    file.seek(offset + max(0, left))
    note = f"\n[shoal] {left} bytes are left out here\n".encode() if left > 0 else b""
    return note + file.read()


def tail(session: str, life: str, offset: int) -> bytes:
    """What a place that was killed had written and nobody had read yet; on its node."""
    text, folder = b"", scratch(session, life)
    with contextlib.suppress(OSError), open(folder / LOG, "rb") as file:
        text = rest(file, offset)
    shutil.rmtree(folder, ignore_errors=True)
    return text


def sweep(session: str) -> None:
    """Remove what places left on this machine that were killed at the end of a run; all others remove it themselves."""
    shutil.rmtree(scratch(session), ignore_errors=True)
