"""The driver of a run on a cluster: it starts places as Ray actors, hears from them, restarts the dead. It touches no data.

One call to each place is always open (`listen`): what it returns are answers, counters, the log; that it fails is the news of a
death. Another one (`live`) is open as long as the place lives. Checkpoints are held here: a place sends the files that its
roles wrote, and gets those that they begin from, so no storage has to be common to the nodes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from shoal.errors import ConfigError, RoleFailed
from shoal.runtime.cores import CoreUse
from shoal.runtime.instance import instance_name
from shoal.runtime.nursery import import_paths
from shoal.runtime.places import TICK_SECONDS, Life, PlaceSupervisor
from shoal.runtime.program import Program
from shoal.runtime.ray.cluster import Cluster
from shoal.runtime.ray.config import RayConfig
from shoal.runtime.ray.fabric import GroupWord, Word
from shoal.runtime.supervisor import Faults, Gone, Session
from shoal.runtime.wires import Group, Shared
from shoal.slots import Inline

__all__ = ["RaySupervisor"]

REPORT_SECONDS = 0.25         # between two reports of a place; longer where there are hundreds
REPORTS_PER_SECOND = 400.0
PATIENCE_SECONDS = 15.0       # after which it is said that a place waits for room
AGAIN_SECONDS = 0.5           # before a place is started again that never came to life
STOP_SECONDS = 5.0            # what a place may take to end by itself
LAST_SECONDS = 5.0            # what its last words may take
STATIC = ("slots", "slot_bytes", "bytes", "epoch", "members")  # of a wire's numbers, those that the driver knows itself
MOVE_SECONDS = 60.0           # what Ray may take to notice the death of a node
CRASH = b"Fatal Python error"
NODE_DIED = "its node has died"  # Ray's own words


@dataclass
class Actor(Life):
    """A place in a Ray actor."""

    born: int = -1                            # the incarnation that its process began with
    handle: Any = None
    life: Any = None                          # its whole life; returns its last words
    line: Any = None                          # its next report
    pid: int | None = None
    node: str = ""
    address: str = ""                         # of its machine
    left: tuple[str, float] = ("", 0.0)       # the node that died under it, and when
    logged: int = 0
    complained: bool = False                  # that it waits for room
    unwritten: str = ""                       # why a file of its checkpoint could not be written
    beats: dict[str, float] = field(default_factory=dict)  # its own clock at its roles' last signs of life
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # its part of every wire, as last reported
    post: tuple[int, int] = (0, 0)            # calls that it has made to other places, bytes that have come from them
    messages: list[dict[str, Any]] = field(default_factory=list)  # what is to be told with the next call
    words: list[Word | GroupWord] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        return self.handle is not None

    def kill(self) -> None:
        if self.handle is not None:
            with contextlib.suppress(RayError):
                ray.kill(self.handle, no_restart=True)


class RaySupervisor(PlaceSupervisor[Actor]):
    def __init__(self, program: Program, session: Session, log_dir: Path, faults: Faults, config: RayConfig) -> None:
        refuse_shared(program)
        blob = cloudpickle.dumps(program)
        log_dir.mkdir(parents=True, exist_ok=True)
        first = [program.place_of(node.name, i).name for node in program.nodes.values() for i in range(node.start)]
        self.cluster = Cluster(program, config, dict.fromkeys(first))
        try:
            program.build(Inline())  # for the counters, and for what the supervisor itself writes: ranks and who is there
            super().__init__(program, session, log_dir, faults, {name: Actor(place) for name, place in program.places.items()})
            self._blob = ray.put(blob)
        except BaseException:
            self.cluster.close()
            raise
        self._lives: dict[str, int] = {}  # instance -> its incarnation
        self._past: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # wires' numbers of places that died
        self._cores = CoreUse()
        self._posted = np.zeros(2)  # calls and bytes of places that died
        self._audience = {(wire.name, end): self._hearers(wire, end) for wire in program.wires.values() for end in wire.ends}
        self._beat = program.stats(*program.instances()[0]).position("heartbeat")
        self.period = max(REPORT_SECONDS, len(self.children) / REPORTS_PER_SECOND)

    def _hearers(self, wire: Any, end: str) -> set[str]:
        """The places that must know of the members of an end: those that hold another one, and in a group all."""
        others = [other for other in wire.ends if other != end] or [end]
        return {self.program.place_of(*user).name for other in others for user in wire.users(other)}

    # ------------------------------------------------------------------ words about members
    def _word(self, port: Any, node: str, index: int) -> Word:
        name = instance_name(node, index)
        return Word(port.wire.name, port.end, port.wire.member_number(port.end, node, index), self._lives.get(name, -1),
                    (node, index) in self._members, name in self.running)

    def _announce(self, node: str, index: int) -> None:
        """Tell everybody whom it concerns what has become of an instance."""
        home = self.program.place_of(node, index).name
        for port in self.program.nodes[node].ports.values():
            word: Word | GroupWord = self._group_word(port.wire) if isinstance(port.wire, Group) else self._word(port, node, index)
            for place in self._audience[port.wire.name, port.end] | {home}:
                if self.children[place].up:
                    self.children[place].words.append(word)

    @staticmethod
    def _group_word(wire: Group) -> GroupWord:
        header = wire.header()
        return GroupWord(wire.name, int(header[0]), [int(rank) for rank in header[2 : 2 + int(header[1])]])

    def _enlist(self, node: str, index: int, here: bool) -> None:
        super()._enlist(node, index, here)
        self._announce(node, index)

    def membership(self, node: str, index: int, alive: bool) -> None:
        changed = alive != ((node, index) in self._members)
        super().membership(node, index, alive)
        if changed:
            self._announce(node, index)

    # ------------------------------------------------------------------ starting
    def _birth(self, node: str, index: int, incarnation: int) -> dict[str, Any]:
        self._lives[instance_name(node, index)] = incarnation
        return super()._birth(node, index, incarnation)

    def _launch(self, child: Actor, births: list[dict[str, Any]], title: str, threads: int) -> None:
        place = child.place.name
        child.born = child.incarnation
        child.handle = self.cluster.start(place, child.born)
        child.pid, child.node, child.left, child.logged, child.complained, child.unwritten = None, "", ("", 0.0), 0, False, ""
        child.messages, child.words, child.peers, child.beats, child.numbers = [], [], {}, {}, {}
        hearers: set[str] = set()
        for node, _ in child.place.members:
            for port in self.program.nodes[node].ports.values():
                hearers |= self._audience[port.wire.name, port.end]
        hearers.discard(place)
        for name in hearers:
            if self.children[name].up:
                self.children[name].peers[place] = (child.handle, child.born)
        for birth in births:
            self._announce(birth["node"], birth["index"])
        child.words = []
        order = {"births": births, "title": title, "threads": threads, "paths": import_paths(),
                 "pages": {name: self.program.page(*_split(name)).copy() for name in child.started},
                 "words": self._all_words(child), "files": self._files(births),
                 "peers": {n: (self.children[n].handle, self.children[n].born) for n in hearers if self.children[n].up}}
        child.life = child.handle.live.remote(order, self._blob)
        child.line = child.handle.listen.remote(self.period)

    def _all_words(self, child: Actor) -> list[Word | GroupWord]:
        """What a place has to know at its birth: the members of the other ends of its wires, and of its own."""
        words: list[Word | GroupWord] = []
        mine = {port.wire.name: port.wire for node, _ in child.place.members for port in self.program.nodes[node].ports.values()}
        for wire in mine.values():
            if isinstance(wire, Group):
                words.append(self._group_word(wire))
                continue
            for end in wire.ends:
                for user in wire.users(end):
                    if child.place.name in self._audience[wire.name, end] or self.program.place_of(*user) is child.place:
                        words.append(self._word(wire.port(end), *user))
        return words

    def _files(self, births: list[dict[str, Any]]) -> dict[str, Any]:
        """The files of the newest checkpoint that these instances may begin from: their own, or, where replicas share one state,
        any of their kind."""
        files: dict[str, Any] = {}
        for birth in births:
            kind = sorted(Path(birth["newest"]).glob(f"{birth['node']}-*.safetensors")) if birth["newest"] else []
            own = [path for path in kind if path.stem == instance_name(birth["node"], birth["index"])]
            for path in own or (kind[:1] if self._share(birth["node"]) else []):
                files[path.name] = np.fromfile(path, np.uint8)
        return files

    def _share(self, node: str) -> bool:
        """Whether replicas share one state, as far as it is known before one of them has said so."""
        role = self.program.nodes[node].role
        return self.sharing.get(node, bool(getattr(role, "shares_state", not isinstance(role, type))))

    def _send(self, instance: str, command: dict[str, Any]) -> None:
        child = self._child(instance)
        unplaced = child.pid is None and command["op"] == "checkpoint"  # it may wait for room for ever, and has nothing to save
        if not child.up or instance not in child.started or unplaced:
            if command["op"] not in ("reply", "start"):
                self._answered(command["id"], None, Gone(f"{instance} is not running"))
            return
        message: dict[str, Any] = {**command, "to": instance}
        if command["op"] == "start":
            node, index = _split(instance)
            message |= {"page": self.program.page(node, index).copy(), "files": self._files([command["arguments"]])}
            self._announce(node, index)
        elif command["op"] == "load":
            path = Path(command["arguments"]["path"])
            message["files"] = {path.name: np.fromfile(path, np.uint8)}
        child.messages.append(message)

    def _flush(self) -> None:
        """Tell every place what has come together for it."""
        for child in self.children.values():
            if child.up and (child.messages or child.words or child.peers):
                child.handle.tell.remote(child.messages, child.words, child.peers)
                child.messages, child.words, child.peers = [], [], {}

    # ------------------------------------------------------------------ hearing
    def _listen(self) -> None:
        if self.cluster.gone:
            self._lose_all()
            return
        self._flush()
        calls = {call: child for child in self.children.values() if child.up for call in (child.line, child.life)}
        if not calls:
            time.sleep(TICK_SECONDS)
            return
        back, _ = ray.wait(list(calls), num_returns=1, timeout=TICK_SECONDS)
        if back:
            back, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for call in back:
            child = calls[call]
            if (call == child.line or call == child.life) and not self._hear(child, call):  # else it was reaped in this very turn
                time.sleep(TICK_SECONDS)
                break
        self._complain()

    def _lose_all(self) -> None:
        """The cluster is not there any more, and nobody on it."""
        if not self.ending:
            raise RoleFailed(f"the Ray cluster at {self.cluster.head} is gone, nobody listens there any more; the newest "
                             "checkpoint is whole: when there is a cluster again, go on with `shoal resume`")
        for child in self.children.values():
            child.handle = child.life = child.line = child.pid = None
            self._bury(child)

    def _hangs(self, child: Actor, now: float) -> str:
        return super()._hangs(child, now) if child.pid is not None else ""  # else it waits for room, which is said

    def _can_start(self, child: Actor, now: float) -> bool:
        """Ray moves the bundles of a dead node when it knows of its death: whoever is started there before dies once more."""
        node, when = child.left
        return not node or now - when > MOVE_SECONDS or not self.cluster.listed(node)

    def _hear(self, child: Actor, call: Any) -> bool:
        """What a call has brought; false where that cannot be told: nobody's death is judged while the cluster may have died."""
        try:
            report = ray.get(call)
            if call == child.line:
                self._heed(child, report)
                child.line = child.handle.listen.remote(self.period)
                return True
            self._hear_out(child)
        except RayError as error:
            if not self.cluster.answers():
                return False
            self._died(child, error)
            return True
        self._heed(child, report)
        self._ended(child, report["code"] == 0, False, child.summary or f"exit code {report['code']}")
        return True

    def _hear_out(self, child: Actor) -> None:
        """What it said just before its last words."""
        with contextlib.suppress(RayError):
            self._heed(child, ray.get(child.line, timeout=LAST_SECONDS))

    def _heed(self, child: Actor, report: dict[str, Any]) -> None:
        if child.pid is None:
            child.pid, child.node, child.address = report["pid"], report["node"], report["address"]
            self.cluster.live_on(child.node)
            if child.complained:
                self.event("placed", child.place.name, f"there is room again, after {time.monotonic() - child.started_at:.0f} s")
            child.started_at = time.monotonic()  # what it may take to start is counted from here
            where = f"on node {child.node} ({report['address']}), process {child.pid}"
            self._append(child, f"[shoal] incarnation {child.born} {where}\n".encode())
        if report["log"]:
            child.logged += len(report["log"])
            self._append(child, report["log"])
        for path, data in report["files"].items():
            self._write(child, path, data)
        now = time.monotonic()
        for name, page in report["pages"].items():
            words = self.program.page(*_split(name))
            before, beat = words[self._beat], page[self._beat]
            words[:] = page
            if beat and beat == child.beats.get(name):
                words[self._beat] = before
            elif beat:
                child.beats[name], words[self._beat] = beat, now  # the clocks of two machines have nothing in common
        child.numbers, child.post = report["wires"] or child.numbers, report["post"]
        for message in report["said"]:
            if message["kind"] == "done" and message["op"] == "checkpoint" and child.unwritten:
                message["error"], child.unwritten = f"{message['from']}: {child.unwritten}", ""
            self._take(child, message)

    def _append(self, child: Actor, text: bytes) -> None:
        with contextlib.suppress(OSError), open(self.log_dir / f"{child.place.name}.log", "ab") as file:  # a full disk
            file.write(text)

    @staticmethod
    def _write(child: Actor, path: str, data: Any) -> None:
        """A file of a checkpoint; if it cannot be written, the place's answer says so."""
        try:
            with open(path, "wb") as file:
                file.write(memoryview(data))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            child.unwritten = str(error)

    def _complain(self) -> None:
        """A place that finds no room is not a silent one."""
        now = time.monotonic()
        for child in self.children.values():
            if child.up and child.pid is None and not child.complained and now - child.started_at > PATIENCE_SECONDS:
                child.complained = True
                self.event("waiting", child.place.name, f"not started for {PATIENCE_SECONDS:g} s; {self.cluster.waits_for()}")

    # ------------------------------------------------------------------ deaths
    def _died(self, child: Actor, error: RayError) -> None:
        if child.pid is None and isinstance(error, RayActorError) and NODE_DIED in str(error):
            self._start_elsewhere(child)
            return
        life = f"{child.place.name}-{child.born}"
        text = self.cluster.read_tail(child.node, life, child.logged) if child.node else b""
        if text:
            self._append(child, text)
        crashed = CRASH in text
        if not isinstance(error, RayActorError):
            cause = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        elif crashed:
            cause = next(line for line in text.decode(errors="replace").splitlines() if CRASH.decode() in line)
        elif NODE_DIED in str(error) or (child.node and not self.cluster.reachable(child.node)):
            cause, child.left = "its node died", (child.node, time.monotonic())
        else:
            cause = "its process was killed"
        self._ended(child, False, isinstance(error, RayActorError) and not crashed, cause)

    def _start_elsewhere(self, child: Actor) -> None:
        """A place whose node died before it had come to life there: nothing was lost that could be counted."""
        self._let_go(child)
        self._bury(child)
        if not self.ending and any(instance_name(node, index) in self.running for node, index in child.place.members):
            child.again_at = time.monotonic() + AGAIN_SECONDS
            self.event("note", child.place.name, "its node died before it had come to life there; it is started elsewhere")

    def _ended(self, child: Actor, well: bool, outside: bool, cause: str) -> None:
        self._let_go(child)
        self._restart(child, self._bury(child), well, outside, cause)

    def _let_go(self, child: Actor) -> None:
        """Of a process that is no more; what it had counted stays."""
        child.kill()
        child.handle = child.life = child.line = child.pid = None
        for name, numbers in child.numbers.items():
            self._bank(self._past[name], numbers)
        self._posted += child.post
        child.numbers, child.post = {}, (0, 0)

    @staticmethod
    def _bank(past: dict[str, float], numbers: dict[str, float]) -> None:
        """What a place that is no more had counted. Slots that it held died with it: they are dropped."""
        for key, value in numbers.items():
            if key == "occupied":
                past["dropped"] += value
            elif key == "version":
                past[key] = max(past[key], value)
            elif key not in STATIC and key != "conserved":
                past[key] += value

    # ------------------------------------------------------------------ reading
    def wires(self) -> dict[str, dict[str, float]]:
        rows = {}
        for name, wire in self.program.wires.items():
            row = dict(wire.numbers())
            parts = [child.numbers[name] for child in self.children.values() if name in child.numbers]
            for part in (self._past.get(name, {}), *parts):
                for key, value in part.items():
                    if key == "version":
                        row[key] = max(row[key], value)
                    elif key not in STATIC and key != "conserved":
                        row[key] = row.get(key, 0.0) + value
            rows[name] = {**row, "conserved": float(all(part["conserved"] for part in parts) and name not in self._unbalanced)}
            self._check_books(name, rows[name])
        return rows

    def surroundings(self) -> dict[str, float]:
        calls, moved = self._posted + np.sum([child.post for child in self.children.values()], 0)
        return {**self.cluster.surroundings(float(calls), float(moved)), **self._cores_busy()}

    def _cores_busy(self) -> dict[str, float]:
        """As on the local runtime, where all places are on this machine; nobody counts the cores of others."""
        if not self.total("env_steps") and not self.total("learner_steps"):
            self._cores = CoreUse()  # how idle the cores are while everybody starts says nothing about the run
        placed = [child for child in self.children.values() if child.pid is not None]
        if any(child.address != self.cluster.address for child in placed):
            return {}
        return {"cores_busy": self._cores.look([child.pid for child in placed if child.pid is not None], time.monotonic())}

    def room(self, role: str) -> float:
        replicas = range(self.program.nodes[role].most)
        idle = [self.program.place_of(role, i).name for i in replicas if instance_name(role, i) not in self.running]
        return self.cluster.room(idle)

    # ------------------------------------------------------------------ ending
    def close(self) -> None:
        """Stop every place: ask first, then kill; and give everything back."""
        self.ending = True
        try:
            for child in self.children.values():
                child.messages.append({"op": "stop"})
                if child.pid is None and not self.cluster.gone:
                    child.kill()  # it never came to life
            deadline = time.monotonic() + STOP_SECONDS
            while any(child.up for child in self.children.values()) and time.monotonic() < deadline:
                self._listen()
            for identity in list(self._waiting):
                self._answered(identity, None, "the run is over")
        finally:
            for child in self.children.values():
                if not self.cluster.gone:
                    child.kill()
                child.handle = None
            self.cluster.close()
            self.program.release()


def _split(name: str) -> tuple[str, int]:
    node, index = name.rsplit("-", 1)
    return node, int(index)


def refuse_shared(program: Program) -> None:
    """Memory that many processes write is not to be had between machines; within one place it is."""
    for wire in program.wires.values():
        places = {program.place_of(*user).name for user in wire.users("view")} if isinstance(wire, Shared) else set()
        if len(places) > 1:
            raise ConfigError(f"--runtime ray has no memory that {len(places)} processes share (wire {wire.name}); use "
                              "--architecture.mode master, or --runtime local")
