"""Hosts made of namespaces on this one machine, and the links between them.

A host has an address, processes, a /tmp, a /dev/shm and a name of its own; it shares processors and other files with this machine.
All hosts hang on a bridge in a namespace without other interfaces, so their traffic never leaves it.

    host 1 ── veth ──┐
    host 2 ── veth ──┼── bridge (a namespace of its own)
    host 3 ── relay ─┘   the relay holds every frame for as long as it is told (netem is not in every kernel)

A link can be cut, limited (tc tbf) and, through the relay, delayed; a host can be rebooted: everything in it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from evidence.lines import ROOT

__all__ = ["Network", "NetworkHost", "network", "why_not"]

SUBNET = "10.77.0"
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc")
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
CLONE_NEWNET = 0x40000000
TUNSETIFF, TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI
FRAME_BYTES = 65_536
READY_SECONDS = 20.0
SETUP = ("mount --make-rprivate / && mount --bind {tmp} /tmp && mount -t tmpfs tmpfs /dev/shm && hostname {name} && "
         "ip link set lo up && echo ready && exec cat")


def why_not() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"hosts of namespaces need {', '.join(lacking)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "the relay of a link needs /dev/net/tun"
    if ROOT.is_relative_to("/tmp"):
        return "hosts of namespaces have a /tmp of their own: this repository must lie elsewhere"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return f"this machine allows no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def checked(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


class Namespaces:
    """Network, processes, mounts and name of a host. Its first process ends when its input closes, so with this program; the
    kernel then ends all the others."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.tmp = folder / name
        self.tmp.mkdir(parents=True, exist_ok=True)
        self._start()

    def _start(self) -> None:
        script = SETUP.format(tmp=self.tmp, name=self.name)
        self.holder = subprocess.Popen([*UNSHARE, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL, text=True)
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"cannot make the host {self.name}")
        self.first = psutil.Process(self.holder.pid).children()[0].pid

    def enter(self, *command: str) -> list[str]:
        """A command line that runs in here, in the folder of the repository."""
        return ["nsenter", "-t", str(self.first), "--net", "--mount", "--uts", "--pid", f"--wdns={ROOT}", *command]

    def do(self, *command: str) -> None:
        checked(self.enter(*command))

    def kill(self) -> None:
        """Kill everything in here, as when the power fails."""
        if self.holder.poll() is not None:
            return
        os.kill(self.first, signal.SIGKILL)
        self.holder.wait()
        for pipe in (self.holder.stdin, self.holder.stdout):
            assert pipe is not None
            pipe.close()


class NetworkHost(Namespaces):
    """One host on the network."""

    def __init__(self, net: Network, number: int, relayed: bool) -> None:
        self.net, self.address, self.relayed = net, f"{SUBNET}.{number}", relayed
        self.relay: subprocess.Popen[str] | None = None
        super().__init__(f"host{number}", net.folder)
        self._connect()

    def _connect(self) -> None:
        switch, port = self.net.switch, self.name
        if self.relayed:
            command = [sys.executable, "-m", "evidence.namespaces", str(self.first), str(switch.first), port]
            self.relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert self.relay.stdout is not None
            if self.relay.stdout.readline() != "relaying\n":
                raise RuntimeError("the relay did not start")
        else:
            here, there = ["name", port, "netns", str(switch.first)], ["name", "eth0", "netns", str(self.first)]
            checked(["ip", "link", "add", *here, "type", "veth", "peer", *there])
        switch.do("ip", "link", "set", port, "master", "bridge", "up")
        number = int(self.address.rpartition(".")[2])
        self.do("ip", "link", "set", "eth0", "address", f"02:00:00:00:00:{number:02x}")  # it keeps its card through a reboot
        self.do("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")
        self.do("ip", "route", "add", "default", "dev", "eth0")  # leads nowhere, but Ray finds out by it which address is its own

    # ------------------------------------------------------------------ what can happen to it
    def cut(self) -> None:
        """Take the link down, at the switch: the host is not told."""
        self.net.switch.do("ip", "link", "set", self.name, "nomaster")

    def mend(self) -> None:
        self.net.switch.do("ip", "link", "set", self.name, "master", "bridge")

    def limit(self, mbit: float) -> None:
        """Limit both directions of the link."""
        shape = ["root", "tbf", "rate", f"{mbit:g}mbit", "burst", "32kb", "latency", "400ms"]
        self.net.switch.do("tc", "qdisc", "replace", "dev", self.name, *shape)
        self.do("tc", "qdisc", "replace", "dev", "eth0", *shape)

    def unlimit(self) -> None:
        self.net.switch.do("tc", "qdisc", "del", "dev", self.name, "root")
        self.do("tc", "qdisc", "del", "dev", "eth0", "root")

    def delay(self, seconds: float) -> None:
        """Hold every frame for this long, in each direction."""
        assert self.relay is not None and self.relay.stdin is not None, f"{self.name} hangs on no relay"
        self.relay.stdin.write(f"{seconds}\n")
        self.relay.stdin.flush()

    def reboot(self) -> None:
        """Kill everything in it, and start it again with nothing running; its disk (/tmp) is kept."""
        self.kill()
        self._start()
        self._connect()

    def kill(self) -> None:
        if self.relay is not None:
            self.relay.kill()
            self.relay.communicate()
            self.relay = None
        super().kill()
        gone = self.net.switch.enter("ip", "link", "del", self.name)  # the kernel would remove it too, but a moment later
        subprocess.run(gone, capture_output=True, check=False)

    def start(self, name: str, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        """Start a command; what it prints is in the file `log(name)`."""
        with open(self.log(name), "ab") as output:
            return subprocess.Popen(self.enter(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                    env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", **env})

    @staticmethod
    def signal(process: subprocess.Popen[bytes], number: int) -> None:
        """Send a signal to a command that was started here; `process` itself only waits for it."""
        for inner in psutil.Process(process.pid).children():
            inner.send_signal(number)

    def log(self, name: str) -> Path:
        return self.tmp / f"{name}.log"


class Network:
    """A bridge and the hosts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.switch = Namespaces("switch", folder)
        self.hosts: list[NetworkHost] = []
        self.switch.do("ip", "link", "add", "name", "bridge", "type", "bridge")
        self.switch.do("ip", "link", "set", "bridge", "up")

    def add(self, relayed: bool = False) -> NetworkHost:
        self.hosts.append(NetworkHost(self, len(self.hosts) + 1, relayed))
        return self.hosts[-1]

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        self.switch.kill()


@contextlib.contextmanager
def network(hosts: int, relayed: Sequence[int] = ()) -> Iterator[Network]:
    """This many hosts; those in `relayed` (1, 2, ...) are behind a relay."""
    with tempfile.TemporaryDirectory(prefix="shoal-hosts-") as folder:
        made = Network(Path(folder))
        try:
            for number in range(1, hosts + 1):
                made.add(number in relayed)
            yield made
        finally:
            made.close()


# ---------------------------------------------------------------------------------------------- the relay
def open_tap(pid: int, name: str) -> int:
    """An interface in the network namespace of a process, whose frames are read and written here."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return tap


def relay(host: int, switch: int, port: str) -> None:
    """Carry frames between a host and a port of the switch; each line of the input is the new delay in seconds."""
    one, other = open_tap(host, "eth0"), open_tap(switch, port)
    across = {one: other, other: one}
    held: deque[tuple[float, int, bytes]] = deque()  # due, to, frame
    delay = 0.0
    print("relaying", flush=True)
    while True:
        rest = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select([*across, sys.stdin], [], [], rest)
        now = time.monotonic()
        for source in readable:
            if source is sys.stdin:
                if not (line := sys.stdin.readline()):
                    return
                delay = float(line)
                continue
            with contextlib.suppress(BlockingIOError):
                for _ in range(100):
                    held.append((now + delay, across[source], os.read(source, FRAME_BYTES)))
        while held and held[0][0] <= time.monotonic():
            _, target, frame = held.popleft()
            with contextlib.suppress(OSError):  # a full queue, or an interface that is down: the frame is lost
                os.write(target, frame)


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
