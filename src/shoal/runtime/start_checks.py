"""Whether this machine can start a program at all: counts open files, processes and memory before any of them exists."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from shoal.runtime.fork_server import FILES
from shoal.runtime.program import Program
from shoal.slots import Channel, InlineAllocator, MemoryBlock

__all__ = ["Need", "cpu_name", "free_memory", "gpu_names", "least", "most_memory", "needs", "shortage"]

LINE_FILES = 2                # a place's socket and its pidfd
SPARE_FILES = 256             # for logs, libraries, environments
SPARE_PROCESSES = 16
PLACE_BYTES = 20_000_000      # private memory of a forked place; 16 small ones were measured at 23 MB each
ROLE_BYTES = 100_000          # the least that a role takes in a process with others
INLINE = InlineAllocator()


@dataclass(frozen=True)
class Need:
    """What a program takes."""

    files: int
    processes: int
    nbytes: int


class CountingAllocator:
    """Allocates nothing, and counts what would be allocated."""

    shared = True

    def __init__(self) -> None:
        self.files = self.nbytes = 0
        self._channel = INLINE.channel(0)

    def memory(self, nbytes: int) -> MemoryBlock:
        self.files += 1
        self.nbytes += nbytes
        return INLINE.memory(0)

    def channel(self, tokens: int) -> Channel:
        self.files += 2  # a pipe
        return self._channel

    def close(self) -> None:
        """There is nothing to release."""


def least(roles: int, runtime: str) -> Need:
    """What this number of roles takes at the very least, before a program is drawn. On `local` each holds an end of a wire."""
    return Need(roles + SPARE_FILES if runtime == "local" else 0, 0, ROLE_BYTES * roles)


def needs(program: Program, runtime: str) -> Need:
    """What a program takes with the most replicas that it can have: every process holds the descriptors of all wires."""
    count = CountingAllocator()
    program.build(count)
    program.release()
    nbytes = count.nbytes + sum(node.most * node.private_bytes for node in program.nodes.values())
    if runtime == "inline":
        return Need(0, 0, nbytes)
    places = len(program.places)
    return Need(count.files + LINE_FILES * places + SPARE_FILES, places + SPARE_PROCESSES, nbytes + PLACE_BYTES * places)


def shortage(need: Need) -> str:
    """What there is not enough of, in words; empty where there is enough."""
    files, processes, memory = most_files(), free_processes(), most_memory()
    if need.files > files:
        return f"needs {need.files:,} open files, and a process may have {files:,} (ulimit -Hn)"
    if need.processes > processes:
        return f"needs {need.processes:,} processes, and there is room for {processes:,} (ulimit -u, kernel.pid_max, pids.max)"
    if need.nbytes > memory:
        return f"needs at least {need.nbytes / 1e9:,.1f} GB of memory, and there are {memory / 1e9:,.1f} GB"
    return ""


def most_files() -> int:
    """How many files a process may open, after `raise_file_limit`."""
    soft, hard = (2**62 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return max(soft, min(hard, FILES))


def free_processes() -> int:
    """How many more processes may be started."""
    here = sum(name.isdigit() for name in os.listdir("/proc"))
    limits = [_number("/proc/sys/kernel/pid_max") - here, _number("/proc/sys/kernel/threads-max") - here]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # it does not bind root
        limits.append(soft - here)
    limits += [_number(f"{group}/pids.max") - _number(f"{group}/pids.current", 0) for group in _groups("pids")]
    return max(0, min(limits))


def cpu_name() -> str:
    """The processor, as the kernel calls it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def gpu_names() -> list[str]:
    """What NVIDIA's driver knows; torch need not be imported for it."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]


def most_memory() -> int:
    """The memory of the machine, or the limit of the container."""
    all_of_it = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = ("memory.max", "memory.limit_in_bytes")
    return min([all_of_it, *(_number(f"{group}/{name}") for group in _groups("memory") for name in names)])


def free_memory() -> int:
    """The free memory of the machine or of the container; files that the system only caches count as free."""
    found = [_field("/proc/meminfo", "MemAvailable:", 2**52) * 1024]
    for limit, used, kept in (("memory.max", "memory.current", "inactive_file"),
                              ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        for group in _groups("memory"):
            taken = _number(f"{group}/{used}", 0) - _field(f"{group}/memory.stat", kept, 0)
            found.append(_number(f"{group}/{limit}") - taken)
    return max(0, min(found))


def _groups(controller: str) -> list[str]:
    """The folders of this process's control groups, versions 2 and 1."""
    found = ["/sys/fs/cgroup", f"/sys/fs/cgroup/{controller}"]  # as a container sees its own
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                found.append(f"/sys/fs/cgroup/{controller if controllers else ''}{path}".rstrip("/"))
    return found


def _number(path: str, default: int = 2**62) -> int:
    """The number in a file of the kernel; the default where there is no file, or no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return default


def _field(path: str, name: str, default: int) -> int:
    """The number after a name in a file of the kernel."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name} ") or line.startswith(f"{name}\t"):
                return int(line.split()[1])
    return default
