"""The Ray actor of a place: its roles' loop runs in one thread, its messenger and its talk with the driver in others.

    live      runs the loop from start to end; returns the last report
    deliver   takes messages of another place's messenger
    tell      takes what the supervisor says: commands for the roles, members of wires, where other places are
    listen    returns what is new: replies, counters, log, files of a checkpoint
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

from shoal.runtime.cleanup import become_subreaper, end_descendants
from shoal.runtime.core_use import waiting_threads
from shoal.runtime.instance import split_name
from shoal.runtime.log_limit import cut_log
from shoal.runtime.place import InstanceStart, PlaceProcess, report, run_place
from shoal.runtime.ray.messenger import Message, Messenger
from shoal.runtime.ray.place_wires import PlaceWires

__all__ = ["LOG", "Host", "scratch", "sweep", "tail"]

LOG = "log"
LOG_BYTES = 1 << 18       # of it in one report
LAST_BYTES = 1 << 24      # of it at the end; of more than this its last part
SWITCH_SECONDS = 0.001    # after which a thread gives way; Python's default of 5 ms would be added to every message


def scratch(session: str, life: str = "") -> Path:
    """Where the places of a run keep files on their own node: logs until the driver has them, files of a checkpoint."""
    return Path(tempfile.gettempdir()) / f"shoal-{session}" / life


class DriverMailbox:
    """What a place says to the driver and hears from it (a place.SupervisorConnection)."""

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
        """Send a file that the driver will write."""
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
        """What was sent since the last time; waits at most `seconds` for something."""
        with self._spoken:
            if not self._said:
                self._spoken.wait(seconds)
            said, files = self._said, self._files
            self._said, self._files = [], {}
        return said, files


class DriverStore:
    """A store whose files are the driver's: saving sends a file there; files to load were sent from there."""

    def __init__(self, store: Any, mailbox: DriverMailbox, folder: Path) -> None:
        self._store, self._mailbox, self._folder = store, mailbox, folder

    def save(self, path: Path, state: Any) -> None:
        own = self._folder / path.name
        try:
            self._store.save(own, state)
            self._mailbox.ship(str(path), np.fromfile(own, np.uint8))
        finally:
            own.unlink(missing_ok=True)

    def load(self, path: Path) -> Any:
        return self._store.load(path)


def unpack(folder: Path, files: dict[str, Any]) -> None:
    """Write files that the driver has sent to a folder from which a store can load them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        np.asarray(data).tofile(folder / name)


class Host:
    def __init__(self, session: str, place: str, incarnation: int) -> None:
        self._place, self._incarnation = place, incarnation
        self._folder = scratch(session, f"{place}-{incarnation}")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._node, self._address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._mailbox = DriverMailbox()
        self._messenger = Messenger(place, incarnation, self._receive)
        self._wires: PlaceWires | None = None
        self._early: list[tuple[Message, Any]] = []  # what came before the wires were laid out
        self._early_statuses: list[Any] = []
        self._lock = threading.Lock()
        self._pages: dict[str, np.ndarray] = {}
        self._logged = 0
        self._reading = threading.Lock()

    # ------------------------------------------------------------------ the loop
    def live(self, order: dict[str, Any], program: bytes) -> dict[str, Any]:
        """Start the place and run it until its end."""
        become_subreaper()  # what environments start, even daemons, stays below this process, and ends with the place
        self._write_log()
        starts = [InstanceStart(**start) for start in order["starts"]]
        try:
            process = self._prepare(order, program)
        except BaseException as failure:
            report(self._mailbox, f"{starts[0].node}-{starts[0].index}", failure)
            return self._last_report(1)
        code = run_place(process, self._mailbox, self._with_files(starts, order["files"]))
        return self._last_report(code)

    def _prepare(self, order: dict[str, Any], blob: bytes) -> PlaceProcess:
        type(self).__name__ = order["title"]  # after every call Ray names the process by its actor's class
        sys.setswitchinterval(SWITCH_SECONDS)
        os.environ["OMP_NUM_THREADS"] = str(order["threads"])  # for a torch that is imported from now on
        os.environ.update(waiting_threads())
        sys.path.extend(path for path in order["paths"] if path not in sys.path)
        program = cloudpickle.loads(blob)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(order["threads"])
        program.store = DriverStore(program.store, self._mailbox, self._folder) if program.store is not None else None
        wires = PlaceWires(program, self._place, self._address, self._messenger.send)
        process = PlaceProcess(program, self._place, self._mailbox)
        wires.allocator.wake = process.rouse
        for name, page in order["pages"].items():
            self._pages[name] = program.page(*split_name(name))
            self._pages[name][:] = page
        self._connect(order["peers"])
        with self._lock:
            self._wires = wires
            wires.told(order["statuses"])
            wires.told(self._early_statuses)
            early, self._early = self._early, []
            for message, payload in early:
                wires.receive(message, payload)
        if self._incarnation > 0:
            wires.await_greetings()
        return process

    def _with_files(self, starts: list[InstanceStart], files: dict[str, Any]) -> list[InstanceStart]:
        """Write the files of a checkpoint to this node, for the instances that start from them."""
        if not files:
            return starts
        folder = self._folder / "newest"
        unpack(folder, files)
        return [InstanceStart(b.node, b.index, b.incarnation, str(folder) if b.newest else None, b.kept_settings) for b in starts]

    def _write_log(self) -> None:
        fd = os.open(self._folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for target in (1, 2):
            os.dup2(fd, target)
        os.close(fd)
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = os.fdopen(os.dup(number), "w", buffering=1)
            setattr(sys, name, stream)
        faulthandler.enable(sys.stderr)  # a crash in native code leaves its stack there

    def _last_report(self, code: int) -> dict[str, Any]:
        end_descendants()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        last = {**self._report(0.0, whole=True), "code": code}
        shutil.rmtree(self._folder, ignore_errors=True)
        return last

    # ------------------------------------------------------------------ messages of other places
    def deliver(self, sender: str, incarnation: int, number: int, headers: list[Any], *payloads: Any) -> None:
        self._messenger.arrive(sender, incarnation, number, headers, payloads)

    def _receive(self, message: Message, payload: Any) -> None:
        wires = self._wires
        if wires is None:
            with self._lock:
                if self._wires is None:
                    self._early.append((message, payload))
                    return
                wires = self._wires
        wires.receive(message, payload)

    # ------------------------------------------------------------------ the driver's
    def tell(self, messages: list[dict[str, Any]], statuses: list[Any], peers: dict[str, Any]) -> None:
        self._connect(peers)
        if statuses:
            with self._lock:
                if self._wires is None:
                    self._early_statuses += statuses
                else:
                    self._wires.told(statuses)
        for message in messages:
            if message["op"] == "load":
                unpack(self._folder, message.pop("files"))
                message["arguments"]["path"] = str(self._folder / Path(message["arguments"]["path"]).name)
            elif message["op"] == "start":
                self._seed(message)
        if messages:
            self._mailbox.hear(messages)

    def _seed(self, message: dict[str, Any]) -> None:
        """An instance that starts in a running place continues with the counters and the state that the driver has."""
        assert self._wires is not None
        arguments = message["arguments"]
        if files := message.pop("files"):
            unpack(self._folder / "newest", files)
            arguments["newest"] = str(self._folder / "newest")
        page = self._pages[message["to"]] = self._wires.program.page(arguments["node"], arguments["index"])
        page[:] = message.pop("page")

    def _connect(self, peers: dict[str, Any]) -> None:
        for place, (handle, incarnation) in peers.items():
            self._messenger.connect(place, handle, incarnation)

    def listen(self, seconds: float) -> dict[str, Any]:
        return self._report(seconds)

    def _report(self, seconds: float, whole: bool = False) -> dict[str, Any]:
        said, files = self._mailbox.gather(seconds)
        wires = self._wires
        return {"said": said, "files": files, "log": self._read_log(whole), "node": self._node, "pid": os.getpid(),
                "address": self._address,
                "pages": {name: page.copy() for name, page in self._pages.items()},
                "logged": self._logged,
                "wires": wires.numbers() if wires is not None else {}, "traffic": (self._messenger.calls, self._messenger.bytes)}

    def _read_log(self, whole: bool) -> bytes:
        """What was logged since the last time: a part of it, or all (`whole`)."""
        with self._reading, contextlib.suppress(OSError), open(self._folder / LOG, "rb") as file:  # the folder may be gone
            if whole:
                text = rest(file, self._logged)
            else:
                file.seek(self._logged)
                text = file.read(LOG_BYTES)
            self._logged = file.tell()
            if not whole and os.fstat(file.fileno()).st_size > LAST_BYTES:  # it is written faster than it is read
                cut_log(self._folder / LOG, LAST_BYTES // 4)
                self._logged = 0
            return text
        return b""


def rest(file: BinaryIO, offset: int) -> bytes:
    """A log from `offset` to its end; of a very long one the last part, after a line that says how much is left out."""
    left = os.fstat(file.fileno()).st_size - offset - LAST_BYTES
    file.seek(offset + max(0, left))
    note = f"\n[shoal] {left} bytes are left out here\n".encode() if left > 0 else b""
    return note + file.read()


def tail(session: str, life: str, offset: int) -> bytes:
    """What a killed place had logged and not reported yet; runs on its node."""
    text, folder = b"", scratch(session, life)
    with contextlib.suppress(OSError), open(folder / LOG, "rb") as file:
        text = rest(file, offset)
    shutil.rmtree(folder, ignore_errors=True)
    return text


def sweep(session: str) -> None:
    """Remove what killed places left on this machine; places that end by themselves remove their own files."""
    shutil.rmtree(scratch(session), ignore_errors=True)
