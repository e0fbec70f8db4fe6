"""Issue 15: several hosts, made of namespaces on this machine (evidence/namespaces.py).

Three hosts: the first has the head of a Ray cluster and the driver of a run, or a replay server; the others have Ray nodes, or
clients. In turn a link is cut for 30 s, limited to 5 Mbit/s and delayed by 50 ms each way, and a host is rebooted. Training must go
on, or end with a sentence and exit code 3; nothing hangs, no traceback is shown. The figures (updates and items per second) are
written down.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evidence.cluster import TrainingProcess
from evidence.lines import KEPT, Line
from evidence.namespaces import Network, NetworkHost, network, why_not

__all__ = ["LINES"]

BIN = Path(sys.executable).parent
PORT = 6379
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_worker_niceness": "0",
         "RAY_USAGE_STATS_ENABLED": "0"}
STORE_BYTES = 80_000_000
CUT_SECONDS, LOST_SECONDS, LOOK_SECONDS = 30.0, 120.0, 15.0
SLOW_MBIT, DELAY_SECONDS = 5.0, 0.05
PATIENCE_SECONDS = 600.0
SAVED = ("--checkpoint.every-seconds", "5", "--console.mode", "plain", "--no-tensorboard", "--no-eval.enabled")
WORDS = (f"a link cut for {CUT_SECONDS:g} s, limited to {SLOW_MBIT:g} Mbit/s and delayed by {1000 * DELAY_SECONDS:g} ms each way, "
         "and a reboot")


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> float:
    """Wait for a condition; how long it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.2)
    return round(time.monotonic() - begun, 1)


# ---------------------------------------------------------------------------------------------- Ray
def serve_ray(host: NetworkHost, head: NetworkHost, cpus: int) -> None:
    """Start Ray on a host, and again whenever it ends, as a service manager would."""
    role = f"--head --port={PORT} --include-dashboard=false" if host is head else f"--address={head.address}:{PORT}"
    size = f"--num-cpus={cpus} --object-store-memory={STORE_BYTES}"
    command = f"{BIN}/ray start {role} --node-ip-address={host.address} {size} --block"
    host.start("ray", ["sh", "-c", f"while true; do {command}; sleep 1; done"], **TOKEN)


@contextlib.contextmanager
def ray_hosts(cpus: tuple[int, ...], relayed: tuple[int, ...] = ()) -> Iterator[Network]:
    """A Ray cluster with a head on the first host."""
    with network(len(cpus), relayed) as net:
        head = net.hosts[0]
        for host, number in zip(net.hosts, cpus, strict=True):
            serve_ray(host, head, number)
            until(lambda where=host: "Ray runtime started" in where.log("ray").read_text(), f"Ray on {host.name}")
        yield net


class HostRun(TrainingProcess):
    """A training run whose driver is on a host."""

    def __init__(self, host: NetworkHost, head: NetworkHost, *arguments: str) -> None:
        self.host, self.directory = host, host.tmp / "run"
        command = [f"{BIN}/shoal", "train", *arguments, *SAVED, "--runtime", "ray", "--ray.address", f"{head.address}:{PORT}",
                   "--ray.wait-seconds", "60", "--run-dir", "/tmp/run"]
        self.process = host.start("driver", command, **TOKEN)

    def said(self) -> str:
        return self.host.log("driver").read_text(errors="replace")

    def address(self, place: str) -> str:
        """The host that a place was last started on."""
        lines = [line for line in self.log(place).splitlines() if line.startswith("[shoal] incarnation")]
        return lines[-1].partition("(")[2].partition(")")[0] if lines else ""

    def log(self, place: str) -> str:
        path = self.directory / "logs" / f"{place}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def lives(self, place: str) -> int:
        return self.log(place).count("[shoal] incarnation")

    def rate(self, seconds: float) -> float:
        """Updates per second for a while."""
        before, begun = self.updates(), time.monotonic()
        until(lambda: self.process.poll() is not None or time.monotonic() - begun > seconds, "time to pass")
        return round((self.updates() - before) / (time.monotonic() - begun), 2)

    def quit(self) -> dict[str, Any]:
        """Ctrl-C; how the run ended."""
        self.host.signal(self.process, signal.SIGINT)
        took = until(lambda: self.process.poll() is not None, "the driver to end after Ctrl-C")
        return {"ended_seconds": took, **self.ending()}

    def ending(self) -> dict[str, Any]:
        path = self.directory / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
        events = [f"{row['event']}: {row.get('role', '')}: {row['text']}" for row in self.rows("event")]
        return {"exit_code": self.process.returncode, "error": summary.get("error"), "events": events,
                "traceback": "Traceback" in self.said(), "last_line": (self.said().strip().splitlines() or [""])[-1],
                **{key: summary.get(key) for key in KEPT}}


def trouble(net: Network, running: HostRun, places: tuple[str, ...]) -> dict[str, Any]:
    """Everything in turn; what it did to the updates per second, and how long until all places worked again."""
    head, second, third = net.hosts
    found: dict[str, Any] = {"undisturbed": running.rate(LOOK_SECONDS)}

    def victims(host: NetworkHost) -> list[str]:
        return [place for place in places if running.address(place) == host.address]

    def back(before: dict[str, int]) -> bool:
        """Whether all that has died since then was started again, and learning goes on."""
        return all(running.lives(place) > count for place, count in before.items())

    lost = victims(second)
    lives = {place: running.lives(place) for place in lost}
    restarts = running.rows("snapshot")[-1]["restarts"]
    second.cut()
    found["cut"] = {"places": lost, "updates_per_second": running.rate(CUT_SECONDS)}
    second.mend()
    running.further(20)
    if running.rows("snapshot")[-1]["restarts"] > restarts:  # else it was too short to be taken for a death
        found["cut"]["back_seconds"] = until(lambda: back(lives), f"{lost} to start again")
    found["after_cut"] = running.rate(LOOK_SECONDS)
    second.limit(SLOW_MBIT)
    found["limited"] = running.rate(LOOK_SECONDS)
    second.unlimit()
    third.delay(DELAY_SECONDS)
    found["delayed"] = running.rate(LOOK_SECONDS)
    third.delay(0.0)
    lost = victims(third)
    lives = {place: running.lives(place) for place in lost}
    third.reboot()
    found["rebooted"] = {"places": lost, "updates_per_second": running.rate(LOOK_SECONDS)}
    serve_ray(third, head, 1)
    found["rebooted"]["back_seconds"] = until(lambda: back(lives), f"{lost} to start again")
    running.further(20)
    found["after_reboot"] = running.rate(LOOK_SECONDS)
    return found


def skipped(run: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """The line; where there can be no hosts, a sentence: what was not seen is not met."""
    def checked(seed: int) -> dict[str, Any]:
        if reason := why_not():
            return {"met": False, "error": reason}
        return run(seed)

    return checked


def goes_on(cpus: tuple[int, int, int], places: tuple[str, ...], *arguments: str) -> Callable[[int], dict[str, Any]]:
    def run(seed: int) -> dict[str, Any]:
        with ray_hosts(cpus, relayed=(3,)) as net:
            running = HostRun(net.hosts[0], net.hosts[0], *arguments, "--seed", str(seed))
            running.further(30)
            where = {place: running.address(place) for place in places}
            found = trouble(net, running, places)
            ended = running.quit()
        rates = [found["after_cut"], found["limited"], found["delayed"], found["after_reboot"]]
        met = ended["exit_code"] == 130 and not ended["traceback"] and ended["stopped_by"] == "interrupt" and min(rates) > 0
        return {"met": met and len(set(where.values())) > 1, "places": where, **found, **ended}

    return run


def driver_cut(seed: int, seconds: float = CUT_SECONDS) -> dict[str, Any]:
    """The driver is on a host whose link to the head is cut: it ends by itself, or goes on afterwards."""
    with ray_hosts((1, 2)) as net:
        running = HostRun(net.hosts[1], net.hosts[0], "impala", "CartPole-v1", "--actors", "2", "--seed", str(seed))
        running.further(30)
        net.hosts[1].cut()
        begun = time.monotonic()
        until(lambda: running.process.poll() is not None or time.monotonic() - begun > seconds, "the cut to last")
        during = running.process.poll() is not None
        net.hosts[1].mend()
        took = round(time.monotonic() - begun, 1)
        if not during:
            start = running.updates()
            until(lambda: running.process.poll() is not None or running.updates() > start + 20, "training or an end")
        alive = running.process.poll() is None
        ended = running.quit() if alive else running.ending()
    told = ended["exit_code"] == 3 and bool(ended["error"]) and "shoal resume" in ended["error"]
    return {"met": (alive or told) and not ended["traceback"], "went_on": alive, "ended_while_cut": during, "after_seconds": took,
            **ended}


def head_reboot(seed: int) -> dict[str, Any]:
    """The head's host is rebooted under a driver on another one: the run ends with a sentence, and is resumed there."""
    with ray_hosts((1, 2)) as net:
        head, other = net.hosts
        running = HostRun(other, head, "impala", "CartPole-v1", "--actors", "2", "--seed", str(seed))
        running.further(30)
        until(lambda: list((running.directory / "checkpoints").glob("0*")), "a checkpoint")
        head.reboot()
        took = until(lambda: running.process.poll() is not None, "the run to end")
        ended = running.ending()
        serve_ray(head, head, 1)
        until(lambda: head.log("ray").read_text().count("Ray runtime started") > 1, "the new head")
        until(lambda: other.log("ray").read_text().count("Ray runtime started") > 1, "the other node to join the new head")
        steps = ended["env_steps"] or 0
        command = [f"{BIN}/shoal", "resume", "/tmp/run", "--max-env-steps", str(steps + 5000), "--console.mode", "none",
                   "--ray.wait-seconds", "60"]
        resumed = other.start("resume", command, **TOKEN)
        until(lambda: resumed.poll() is not None, "the resumed run to end")
        said = other.log("resume").read_text()
    told = ended["exit_code"] == 3 and bool(ended["error"]) and "shoal resume" in ended["error"]
    return {"met": told and not ended["traceback"] and resumed.returncode == 0, "after_seconds": took,
            "resumed": resumed.returncode, "resume_said": said[-500:], **ended}


# ---------------------------------------------------------------------------------------------- replay
CLIENT = """
import json, sys, time
from pathlib import Path
import numpy as np
from shoal import replay
kind, address = sys.argv[1:]
client = replay.Client(address, replay.Key.load(f"/tmp/{kind}.json"), timeout=120)
writer = client.writer(max_history=2) if kind == "writer" else None
count, told = 0, 0.0
while not Path("/tmp/stop").exists():
    if writer is not None:
        writer.append({"i": count, "x": np.full(700, count % 251, np.int64)})
        writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in ("i", "x")})
        count += 1
        if count % 10 == 0:
            writer.flush()
    else:
        batch = client.sample("t", 16)
        assert (batch.data["x"] == batch.data["i"][:, None] % 251).all()
        client.update_priorities("t", batch.info.keys, np.ones(16))
        count += 16
    if time.monotonic() - told > 0.2:
        told = time.monotonic()
        print(count, flush=True)
    time.sleep(0.001)
if writer is not None:
    writer.flush()
print(json.dumps({"count": count, "lost": writer.lost if writer is not None else 0}), flush=True)
"""


class HostClient:
    """A writer or a sampler on a host."""

    def __init__(self, host: NetworkHost, kind: str, address: str) -> None:
        self.host, self.kind = host, kind
        self.process = host.start(kind, [sys.executable, "-c", CLIENT, kind, address])

    def said(self) -> list[str]:
        return self.host.log(self.kind).read_text(errors="replace").splitlines()

    def count(self) -> int:
        if self.process.poll() is not None:
            raise RuntimeError(f"the {self.kind} ended: {self.said()[-5:]}")
        return int(self.said()[-1]) if self.said() else 0


def serve_replay(host: NetworkHost) -> float:
    """Start the server; how long it took."""
    served = host.log("server").read_text().count("serving") if host.log("server").exists() else 0
    command = [f"{BIN}/shoal", "replay", "serve", "--table", "t:prioritized:1000000", "--address", f"tcp://{host.address}:7777",
               "--key", "/tmp/keys/server.json", "--checkpoint-dir", "/tmp/checkpoints", "--checkpoint-seconds", "2"]
    host.start("server", command)
    return until(lambda: host.log("server").read_text().count("serving") > served, "the replay server to start")


def ask_info(host: NetworkHost, kind: str, address: str) -> tuple[int, str]:
    """`shoal replay info` on a host, and what it says."""
    command = [f"{BIN}/shoal", "replay", "info", address, "--key", f"/tmp/{kind}.json", "--timeout", "5"]
    done = subprocess.run(host.enter(*command), capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, (done.stdout + done.stderr).strip()


def rates(clients: list[HostClient], seconds: float) -> dict[str, float]:
    """Items per second of every client for a while."""
    before, begun = [client.count() for client in clients], time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - begun
    return {client.kind: round((client.count() - start) / elapsed, 1) for client, start in zip(clients, before, strict=True)}


def replay_hosts(seed: int) -> dict[str, Any]:
    with network(3, relayed=(3,)) as net:
        first, second, third = net.hosts
        address = f"tcp://{first.address}:7777"
        for kind, host in (("writer", second), ("sampler", third)):
            first.do(f"{BIN}/shoal", "replay", "keys", "/tmp/keys", "--client", kind)
            (host.tmp / f"{kind}.json").write_bytes((first.tmp / "keys" / f"{kind}.json").read_bytes())
        serve_replay(first)
        clients = [HostClient(second, "writer", address), HostClient(third, "sampler", address)]
        until(lambda: all(client.count() > 100 for client in clients), "the clients to begin")
        found: dict[str, Any] = {"undisturbed": rates(clients, LOOK_SECONDS)}
        second.cut()
        begun = time.monotonic()
        found["info_while_cut"] = ask_info(second, "writer", address)
        found["cut"] = rates(clients, max(1.0, CUT_SECONDS - (time.monotonic() - begun)))
        second.mend()
        found["after_cut"] = rates(clients, LOOK_SECONDS)
        second.limit(SLOW_MBIT)
        found["limited"] = rates(clients, LOOK_SECONDS)
        second.unlimit()
        third.delay(DELAY_SECONDS)
        found["delayed"] = rates(clients, LOOK_SECONDS)
        third.delay(0.0)
        first.reboot()
        found["server_start_seconds"] = serve_replay(first)
        counts = [client.count() for client in clients]
        found["back_seconds"] = until(lambda: all(client.count() > count for client, count in zip(clients, counts, strict=True)),
                                      "the clients to go on")
        found["after_reboot"] = rates(clients, LOOK_SECONDS)
        for client in clients:
            (client.host.tmp / "stop").touch()
        until(lambda: all(client.process.poll() is not None for client in clients), "the clients to end")
        told = {client.kind: json.loads(client.said()[-1]) for client in clients}
        code, info = ask_info(second, "writer", address)
    stored = re.search(r"size +(\d+) of", info)
    gap = told["writer"]["count"] - int(stored[1]) if stored else None
    refused = found["info_while_cut"]
    met = code == 0 and gap == told["writer"]["lost"] and refused[0] == 1 and "Traceback" not in refused[1]
    return {"met": met, "told": told, "gap": gap, "info": info, **found}


REAL = "on three hosts made of namespaces"
LINES = [
    Line("hosts-actors", 15, f"impala with 2 actors {REAL}, joined with --ray.address: training goes on through {WORDS}",
         skipped(goes_on((1, 1, 1), ("learner-0", "actor-0", "actor-1"), "impala", "CartPole-v1", "--actors", "2")), seeds=(0,)),
    Line("hosts-learners", 15, f"a group of 2 learners on two hosts: training goes on through {WORDS}",
         skipped(goes_on((0, 1, 1), ("main-0", "main-1"), "impala", "CartPole-v1", "--learners", "2",
                         "--actors", "2", "--architecture.one-place")), seeds=(0,)),
    Line("hosts-driver-cut", 15, f"the link between the driver's host and the head is cut for {CUT_SECONDS:g} s: the run goes on, "
         "or ends with a sentence that names `shoal resume`", skipped(driver_cut), seeds=(0,)),
    Line("hosts-driver-lost", 15, f"as hosts-driver-cut, for {LOST_SECONDS:g} s",
         skipped(lambda seed: driver_cut(seed, LOST_SECONDS)), seeds=(0,)),
    Line("hosts-head-reboot", 15, "the host of the cluster's head is rebooted: the run ends with a sentence and is resumed on the "
         "new cluster", skipped(head_reboot), seeds=(0,)),
    Line("hosts-replay", 15, f"a replay server and its clients {REAL}, with keys: clients go on through {WORDS} of the server, and "
         "what is lost is counted", skipped(replay_hosts), seeds=(0,)),
]
