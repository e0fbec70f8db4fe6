"""The driver of a run on a cluster: it starts places as Ray actors, takes their reports and restarts those that die.

One call to each place is always open (`listen`). It returns replies, counters and the log; when it fails, the place has died.
Another one (`live`) is open as long as the place lives. The driver holds the checkpoints: a place sends the files that its roles
wrote, and is sent those that they start from, so the nodes need no common storage. The driver touches no other data.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from shoal.errors import ConfigError, RoleFailed
from shoal.files import sync
from shoal.runtime.core_use import CoreUse
from shoal.runtime.fork_server_client import import_paths
from shoal.runtime.instance import instance_name, shares_state, split_name
from shoal.runtime.place_supervisor import TICK_SECONDS, PlaceState, PlaceSupervisor
from shoal.runtime.program import Program
from shoal.runtime.ray.cluster import RayCluster
from shoal.runtime.ray.place_wires import GroupStatus, MemberStatus
from shoal.runtime.ray.ray_config import RayConfig
from shoal.runtime.ray.wire_totals import WireTotals
from shoal.runtime.supervisor import Faults, NotRunning, Session
from shoal.runtime.wires import GroupWire, Port, SharedWire, Wire
from shoal.slots import InlineAllocator

__all__ = ["RaySupervisor"]

REPORT_SECONDS = 0.25         # between two reports of a place; longer where there are hundreds
REPORTS_PER_SECOND = 400.0
PATIENCE_SECONDS = 15.0       # after which an event says that a place waits for free CPUs
AGAIN_SECONDS = 0.5           # before a place whose node died is started elsewhere
STOP_SECONDS = 5.0            # that a place may take to end by itself
LAST_SECONDS = 5.0            # that its last report may take
MOVE_SECONDS = 60.0           # that Ray may take to notice the death of a node
CRASH = b"Fatal Python error"
NODE_DIED = "its node has died"  # Ray's own words


@dataclass
class RayPlace(PlaceState):
    """A place in a Ray actor."""

    born: int = -1                            # the incarnation that its process started with
    handle: Any = None
    life_call: Any = None                     # returns its last report when it ends
    report_call: Any = None                   # returns its next report
    pid: int | None = None                    # None: not started by Ray yet
    node: str = ""
    address: str = ""                         # of its machine
    left: tuple[str, float] = ("", 0.0)       # the node that died under it, and when
    logged: int = 0                           # bytes of its log that were received
    complained: bool = False                  # an event has said that it waits for free CPUs
    unwritten: str = ""                       # why a file of its checkpoint could not be written
    beats: dict[str, float] = field(default_factory=dict)  # by its own clock: its roles' last signs of life
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # its part of every wire, as last reported
    traffic: tuple[int, int] = (0, 0)         # calls that it has made to other places, bytes that it has received from them
    messages: list[dict[str, Any]] = field(default_factory=list)  # to send with the next call, and so are the next two
    statuses: list[MemberStatus | GroupStatus] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        return self.handle is not None

    def kill(self) -> None:
        if self.handle is not None:
            with contextlib.suppress(RayError):
                ray.kill(self.handle, no_restart=True)


class RaySupervisor(PlaceSupervisor[RayPlace]):
    def __init__(self, program: Program, session: Session, log_dir: Path, faults: Faults, config: RayConfig) -> None:
        refuse_shared(program)
        blob = cloudpickle.dumps(program)
        log_dir.mkdir(parents=True, exist_ok=True)
        first = [program.place_of(node.name, i).name for node in program.nodes.values() for i in range(node.start)]
        self.cluster = RayCluster(program, config, dict.fromkeys(first))
        try:
            program.build(InlineAllocator())  # for the counters, and for what the supervisor itself writes: ranks and members
            super().__init__(program, session, log_dir, faults, {name: RayPlace(place) for name, place in program.places.items()})
            self._blob = ray.put(blob)
        except BaseException:
            self.cluster.close()
            raise
        self._lives: dict[str, int] = {}  # instance -> its incarnation
        self._totals = WireTotals()
        self._cores = CoreUse()
        self._past_traffic = np.zeros(2)  # calls and bytes of places that died
        self._audience = {(wire.name, end): self._places_to_tell(wire, end) for wire in program.wires.values() for end in wire.ends}
        self._beat = program.stats(*program.instances()[0]).position("heartbeat")
        self.period = max(REPORT_SECONDS, len(self.children) / REPORTS_PER_SECOND)

    def _places_to_tell(self, wire: Wire, end: str) -> set[str]:
        """The places that must know the members of an end: those that hold another end; of a group, all."""
        others = [other for other in wire.ends if other != end] or [end]
        return {self.program.place_of(*user).name for other in others for user in wire.users(other)}

    # ------------------------------------------------------------------ the status of members
    def _status(self, port: Port, node: str, index: int) -> MemberStatus:
        name = instance_name(node, index)
        return MemberStatus(port.wire.name, port.end, port.wire.member_number(port.end, node, index), self._lives.get(name, -1),
                            (node, index) in self._members, name in self.running)

    def _announce(self, node: str, index: int) -> None:
        """Tell every place that shares a wire with an instance what has become of it."""
        home = self.program.place_of(node, index).name
        for port in self.program.nodes[node].ports.values():
            status: MemberStatus | GroupStatus
            status = self._group_status(port.wire) if isinstance(port.wire, GroupWire) else self._status(port, node, index)
            for place in self._audience[port.wire.name, port.end] | {home}:
                if self.children[place].up:
                    self.children[place].statuses.append(status)

    @staticmethod
    def _group_status(wire: GroupWire) -> GroupStatus:
        header = wire.header()
        return GroupStatus(wire.name, int(header[0]), [int(rank) for rank in header[2 : 2 + int(header[1])]])

    def _enlist(self, node: str, index: int, here: bool) -> None:
        super()._enlist(node, index, here)
        self._announce(node, index)

    def membership(self, node: str, index: int, alive: bool) -> None:
        changed = alive != ((node, index) in self._members)
        super().membership(node, index, alive)
        if changed:
            self._announce(node, index)

    # ------------------------------------------------------------------ starting
    def _instance_start(self, node: str, index: int, incarnation: int) -> dict[str, Any]:
        self._lives[instance_name(node, index)] = incarnation
        return super()._instance_start(node, index, incarnation)

    def _launch(self, child: RayPlace, starts: list[dict[str, Any]], title: str, threads: int) -> None:
        place = child.place.name
        child.born = child.incarnation
        child.handle = self.cluster.start(place, child.born)
        child.pid, child.node, child.left, child.logged, child.complained, child.unwritten = None, "", ("", 0.0), 0, False, ""
        child.messages, child.statuses, child.peers, child.beats, child.numbers = [], [], {}, {}, {}
        neighbours: set[str] = set()
        for node, _ in child.place.members:
            for port in self.program.nodes[node].ports.values():
                neighbours |= self._audience[port.wire.name, port.end]
        neighbours.discard(place)
        for name in neighbours:
            if self.children[name].up:
                self.children[name].peers[place] = (child.handle, child.born)
        for start in starts:
            self._announce(start["node"], start["index"])
        child.statuses = []
        order = {"starts": starts, "title": title, "threads": threads, "paths": import_paths(),
                 "pages": {name: self.program.page(*split_name(name)).copy() for name in child.started},
                 "statuses": self._all_statuses(child), "files": self._files(starts),
                 "peers": {n: (self.children[n].handle, self.children[n].born) for n in neighbours if self.children[n].up}}
        child.life_call = child.handle.live.remote(order, self._blob)
        child.report_call = child.handle.listen.remote(self.period)

    def _all_statuses(self, child: RayPlace) -> list[MemberStatus | GroupStatus]:
        """What a place has to know when it starts: the members of the other ends of its wires, and of its own."""
        statuses: list[MemberStatus | GroupStatus] = []
        mine = {port.wire.name: port.wire for node, _ in child.place.members for port in self.program.nodes[node].ports.values()}
        for wire in mine.values():
            if isinstance(wire, GroupWire):
                statuses.append(self._group_status(wire))
                continue
            for end in wire.ends:
                for user in wire.users(end):
                    if child.place.name in self._audience[wire.name, end] or self.program.place_of(*user) is child.place:
                        statuses.append(self._status(wire.port(end), *user))
        return statuses

    def _files(self, starts: list[dict[str, Any]]) -> dict[str, Any]:
        """The files of the newest checkpoint that these instances may start from: their own or, where replicas share one state,
        any replica's."""
        files: dict[str, Any] = {}
        for start in starts:
            kind = sorted(Path(start["newest"]).glob(f"{start['node']}-*.safetensors")) if start["newest"] else []
            own = [path for path in kind if path.stem == instance_name(start["node"], start["index"])]
            for path in own or (kind[:1] if self._share(start["node"]) else []):
                files[path.name] = np.fromfile(path, np.uint8)
        return files

    def _share(self, node: str) -> bool:
        """Whether replicas share one state. Before one of them runs, a class says so itself; of a function it is not known, so the
        file is sent."""
        role = self.program.nodes[node].role
        return self.sharing.get(node, shares_state(role) if isinstance(role, type) else True)

    def _send(self, instance: str, command: dict[str, Any]) -> None:
        child = self._child(instance)
        unplaced = child.pid is None and command["op"] == "checkpoint"  # it may wait for CPUs for ever, and has nothing to save
        if not child.up or instance not in child.started or unplaced:
            if command["op"] not in ("reply", "start"):
                self._answered(command["id"], None, NotRunning(f"{instance} is not running"))
            return
        message: dict[str, Any] = {**command, "to": instance}
        if command["op"] == "start":
            node, index = split_name(instance)
            message |= {"page": self.program.page(node, index).copy(), "files": self._files([command["arguments"]])}
            self._announce(node, index)
        elif command["op"] == "load":
            path = Path(command["arguments"]["path"])
            message["files"] = {path.name: np.fromfile(path, np.uint8)}
        child.messages.append(message)

    def _flush(self) -> None:
        """Send every place the messages that were collected for it."""
        for child in self.children.values():
            if child.up and (child.messages or child.statuses or child.peers):
                child.handle.tell.remote(child.messages, child.statuses, child.peers)
                child.messages, child.statuses, child.peers = [], [], {}

    # ------------------------------------------------------------------ reports
    def _listen(self) -> None:
        if self.cluster.gone:
            self._lose_all()
            return
        self._flush()
        calls = {call: child for child in self.children.values() if child.up for call in (child.report_call, child.life_call)}
        if not calls:
            time.sleep(TICK_SECONDS)
            return
        back, _ = ray.wait(list(calls), num_returns=1, timeout=TICK_SECONDS)
        if back:
            back, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for call in back:
            child = calls[call]
            current = call == child.report_call or call == child.life_call  # else its death was dealt with in this very turn
            if current and not self._hear(child, call):
                time.sleep(TICK_SECONDS)
                break
        self._complain()

    def _lose_all(self) -> None:
        """The cluster is gone, and all places with it."""
        if not self.ending:
            saved = self.session.newest() is not None
            how = ("the newest checkpoint is whole: start a cluster and continue with `shoal resume`" if saved else
                   "there is no checkpoint yet: start a cluster and a new run")
            raise RoleFailed(f"the Ray cluster at {self.cluster.head} is gone: {self.cluster.why_gone}; {how}")
        for child in self.children.values():
            child.handle = child.life_call = child.report_call = child.pid = None
            self._remove_members(child)

    def _hangs(self, child: RayPlace, now: float) -> str:
        return super()._hangs(child, now) if child.pid is not None else ""  # else it waits for CPUs, which an event says

    def _can_start(self, child: RayPlace, now: float) -> bool:
        """Ray moves the bundles of a dead node once it has noticed the death: a place that is started earlier would die again."""
        node, when = child.left
        return not node or now - when > MOVE_SECONDS or not self.cluster.listed(node)

    def _hear(self, child: RayPlace, call: Any) -> bool:
        """Take the result of a call. False when it failed while the cluster may have died: then no place is to blame."""
        try:
            report = ray.get(call)
            if call == child.report_call:
                self._apply_report(child, report)
                child.report_call = child.handle.listen.remote(self.period)
                return True
            self._hear_last_report(child)
        except RayError as error:
            if not self.cluster.answers():
                return False
            self._died(child, error)
            return True
        self._apply_report(child, report)
        self._ended(child, report["code"] == 0, False, child.summary or f"exit code {report['code']}")
        return True

    def _hear_last_report(self, child: RayPlace) -> None:
        """What it reported just before its last report."""
        with contextlib.suppress(RayError):
            self._apply_report(child, ray.get(child.report_call, timeout=LAST_SECONDS))

    def _apply_report(self, child: RayPlace, report: dict[str, Any]) -> None:
        if child.pid is None:
            child.pid, child.node, child.address = report["pid"], report["node"], report["address"]
            self.cluster.used(child.node)
            if child.complained:
                waited = time.monotonic() - child.started_at
                self.event("placed", child.place.name, f"started after waiting {waited:.0f} s for CPUs")
            child.started_at = time.monotonic()  # the time limit for starting counts from here
            where = f"on node {child.node} ({report['address']}), process {child.pid}"
            self._append(child, f"[shoal] incarnation {child.born} {where}\n".encode())
        if report["log"]:
            self._append(child, report["log"])
        child.logged = report["logged"]
        for path, data in report["files"].items():
            self._write(child, path, data)
        now = time.monotonic()
        for name, page in report["pages"].items():
            words = self.program.page(*split_name(name))
            before, beat = words[self._beat], page[self._beat]
            words[:] = page
            if beat and beat == child.beats.get(name):
                words[self._beat] = before
            elif beat:
                child.beats[name], words[self._beat] = beat, now  # two machines have different clocks
        child.numbers, child.traffic = report["wires"] or child.numbers, report["traffic"]
        for message in report["said"]:
            if message["kind"] == "done" and message["op"] == "checkpoint" and child.unwritten:
                message["error"], child.unwritten = f"{message['from']}: {child.unwritten}", ""
            self._take(child, message)

    def _append(self, child: RayPlace, text: bytes) -> None:
        with contextlib.suppress(OSError), open(self.log_dir / f"{child.place.name}.log", "ab") as file:  # a full disk
            file.write(text)

    @staticmethod
    def _write(child: RayPlace, path: str, data: Any) -> None:
        """Write a file of a checkpoint; if that fails, the reply of the place's role says so."""
        try:
            Path(path).write_bytes(memoryview(data))
            sync(Path(path))
        except OSError as error:
            child.unwritten = str(error)

    def _complain(self) -> None:
        """Say once which places wait for free CPUs: they are not hung."""
        now = time.monotonic()
        for child in self.children.values():
            if child.up and child.pid is None and not child.complained and now - child.started_at > PATIENCE_SECONDS:
                child.complained = True
                self.event("waiting", child.place.name, f"waiting for CPUs for {PATIENCE_SECONDS:g} s; {self.cluster.waits_for()}")

    def complete(self) -> bool:
        """Checkpoints do not wait for places that wait for CPUs, perhaps for ever, once there is something to save."""
        return bool(self.stateful & self.running.keys()) and all(self._child(name).complained for name in self.unheard())

    # ------------------------------------------------------------------ deaths
    def _died(self, child: RayPlace, error: RayError) -> None:
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
        elif isinstance(error, ActorUnavailableError):  # it may live, but nothing says whether it will ever report again
            cause = "the connection to its node broke"
        else:
            cause = "its process was killed"
        self._ended(child, False, isinstance(error, RayActorError) and not crashed, cause)

    def _start_elsewhere(self, child: RayPlace) -> None:
        """The node died before the place had started there: nothing was lost, and no failure is counted."""
        self._let_go(child)
        self._remove_members(child)
        if not self.ending and any(instance_name(node, index) in self.running for node, index in child.place.members):
            child.again_at = time.monotonic() + AGAIN_SECONDS
            self.event("note", child.place.name, "its node died before it had started there; it is started elsewhere")

    def _ended(self, child: RayPlace, well: bool, outside: bool, cause: str) -> None:
        self._let_go(child)
        self._restart(child, self._remove_members(child), well, outside, cause)

    def _let_go(self, child: RayPlace) -> None:
        """Forget a process that has ended; what it had counted is kept."""
        child.kill()
        child.handle = child.life_call = child.report_call = child.pid = None
        self._totals.keep(child.numbers)
        self._past_traffic += child.traffic
        child.numbers, child.traffic = {}, (0, 0)

    # ------------------------------------------------------------------ reading
    def wires(self) -> dict[str, dict[str, float]]:
        rows = {}
        for name, wire in self.program.wires.items():
            parts = [child.numbers[name] for child in self.children.values() if name in child.numbers]
            row = self._totals.add_up(name, wire.numbers(), parts)
            rows[name] = {**row, "conserved": float(all(part["conserved"] for part in parts) and name not in self._unbalanced)}
            self._check_conserved(name, rows[name])
        return rows

    def surroundings(self) -> dict[str, float]:
        calls, moved = self._past_traffic + np.sum([child.traffic for child in self.children.values()], 0)
        return {**self.cluster.surroundings(float(calls), float(moved)), **self._cores_busy()}

    def _cores_busy(self) -> dict[str, float]:
        """As on the local runtime, if all places are on this machine; the cores of other machines are not counted."""
        if self.starting():
            self._cores = CoreUse()  # how idle the cores are while roles start says nothing about the run
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
        """Stop every place: ask first, then kill; and release everything."""
        self.ending = True
        try:
            for child in self.children.values():
                child.messages.append({"op": "stop"})
                if child.pid is None and not self.cluster.gone:
                    child.kill()  # it has not started
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


def refuse_shared(program: Program) -> None:
    """Machines share no memory; only the roles of one place can hold a shared wire."""
    for wire in program.wires.values():
        if not isinstance(wire, SharedWire):
            continue
        places = {program.place_of(*user).name for user in wire.users("view")}
        if len(places) > 1:
            instead = f"{wire.instead}, or " if wire.instead else ""
            raise ConfigError(f"--runtime ray has no memory that {len(places)} processes share (wire {wire.name}); use {instead}"
                              "--runtime local")
