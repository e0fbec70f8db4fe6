"""Whether a program can be started on this machine at all: open files, processes, memory, counted before any of them exists."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from shoal.runtime.forkserver import FILES
from shoal.runtime.program import Program
from shoal.runtime.wires import Stream
from shoal.slots import Channel, Inline, Memory

__all__ = ["Need", "free_memory", "least", "most_memory", "needs", "shortage"]

LINE_FILES = 2                # a place's socket and its pidfd
SPARE_FILES = 256             # for logs, libraries, environments
SPARE_PROCESSES = 16
PLACE_BYTES = 20_000_000      # of its own; 16 actors of CartPole have 23 MB each
ROLE_BYTES = 100_000          # the least that a role with an environment and a network takes in a process with others
STAGES = 3                    # batches that a learner has side by side, each of `batch_slots` unrolls
INLINE = Inline()


@dataclass(frozen=True)
class Need:
    """What a program takes."""

    files: int
    processes: int
    nbytes: int


class Tally:
    """A medium that makes nothing, and counts what would be made."""

    shared = True

    def __init__(self) -> None:
        self.files = self.nbytes = 0
        self._channel = INLINE.channel(0)

    def memory(self, nbytes: int) -> Memory:
        self.files += 1
        self.nbytes += nbytes
        return INLINE.memory(0)

    def channel(self, tokens: int) -> Channel:
        self.files += 2  # a pipe
        return self._channel

    def close(self) -> None:
        """Nothing to give back."""


def least(roles: int, runtime: str) -> Need:
    """What so many roles take at the very least, before anything is drawn: each has an end of a wire, if it is not inline."""
    return Need(roles + SPARE_FILES if runtime == "local" else 0, 0, ROLE_BYTES * roles)


def needs(program: Program, runtime: str) -> Need:
    """What the most replicas that there can be would take: every process holds the descriptors of all wires."""
    tally = Tally()
    program.build(tally)
    program.release()
    nbytes = tally.nbytes + staged(program)
    if runtime == "inline":
        return Need(0, 0, nbytes)
    places = len(program.places)
    return Need(tally.files + LINE_FILES * places + SPARE_FILES, places + SPARE_PROCESSES, nbytes + PLACE_BYTES * places)


def staged(program: Program) -> int:
    """What learners copy unrolls to: the batches they join them into, and the buffer they draw them from."""
    total = 0
    for node in program.nodes.values():
        slots = STAGES * (node.arguments.get("batch_slots") or 0)
        reuse = node.arguments.get("reuse")
        slots += reuse["capacity"] + reuse["delay"] if reuse else 0
        total += sum(node.most * slots * port.wire.layout.nbytes for port in node.ports.values() if isinstance(port.wire, Stream))
    return total


def shortage(need: Need) -> str:
    """What there is not enough of, in words; empty where all is well."""
    files, processes, memory = most_files(), free_processes(), most_memory()
    if need.files > files:
        return f"needs {need.files:,} open files, and a process may have {files:,} (ulimit -Hn)"
    if need.processes > processes:
        return f"needs {need.processes:,} processes, and there is room for {processes:,} (ulimit -u, kernel.pid_max, pids.max)"
    if need.nbytes > memory:
        return f"needs at least {need.nbytes / 1e9:,.1f} GB of memory, and there are {memory / 1e9:,.1f} GB"
    return ""


def most_files() -> int:
    """After `raise_file_limit`."""
    soft, hard = (2**62 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return max(soft, min(hard, FILES))


def free_processes() -> int:
    """Beside those that there are."""
    here = sum(name.isdigit() for name in os.listdir("/proc"))
    limits = [_number("/proc/sys/kernel/pid_max") - here, _number("/proc/sys/kernel/threads-max") - here]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # it does not bind root
        limits.append(soft - here)
    limits += [_number(f"{group}/pids.max") - _number(f"{group}/pids.current", 0) for group in _groups("pids")]
    return max(0, min(limits))


def most_memory() -> int:
    """Of the machine, or of the container."""
    all_of_it = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = ("memory.max", "memory.limit_in_bytes")
    return min([all_of_it, *(_number(f"{group}/{name}") for group in _groups("memory") for name in names)])


def free_memory() -> int:
    """Of the machine, or of the container: what nobody has, with what the system only keeps for later."""
    found = [_field("/proc/meminfo", "MemAvailable:", 2**52) * 1024]
    for limit, used, kept in (("memory.max", "memory.current", "inactive_file"),
                              ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        for group in _groups("memory"):
            taken = _number(f"{group}/{used}", 0) - _field(f"{group}/memory.stat", kept, 0)
            found.append(_number(f"{group}/{limit}") - taken)
    return max(0, min(found))


def _groups(controller: str) -> list[str]:
    """The folders of this process's control groups, version 2 and 1."""
    found = ["/sys/fs/cgroup", f"/sys/fs/cgroup/{controller}"]  # as a container sees its own
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                found.append(f"/sys/fs/cgroup/{controller if controllers else ''}{path}".rstrip("/"))
    return found


def _number(path: str, default: int = 2**62) -> int:
    """What a file of the kernel's says; the default where there is none, or no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return default


def _field(path: str, name: str, default: int) -> int:
    """The number behind a name in a file of the kernel's."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name} ") or line.startswith(f"{name}\t"):
                return int(line.split()[1])
    return default
