"""Cuts connections that send one message without end.

zmq hands a message over when its last frame has come, and bounds each frame but not their sum: a client that never sends a last
frame would fill the server's memory. TCP counts the bytes that came through a connection. A unix socket does not, so there a
connection counts as endless when it keeps sending without a finished message while this process grows.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import termios
from pathlib import Path

from shoal.replay.service.messages import MOST_MESSAGE_BYTES

__all__ = ["ConnectionWatch"]

LOG = logging.getLogger("shoal.replay")
MOST_UNFINISHED_BYTES = MOST_MESSAGE_BYTES + (1 << 26)  # with the headers of its frames
MOST_GROWTH_BYTES = 2 * MOST_MESSAGE_BYTES
"""How much the process may grow while a connection is in the middle of a message: small frames take far more memory than bytes."""
SENDING_BYTES = 1 << 23
SENDING_SWEEPS = 3
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for 0 s: a sender that waits for room in a full window is told at once
TCP_BYTES_RECEIVED = 128  # the offset of tcpi_bytes_received in Linux's struct tcp_info


class ConnectionProgress:
    """One connection, and where it stood when its last message was finished."""

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.finished = True  # a message since the last sweep
        self.received = self.grown = 0  # its bytes and this process's at that time
        self.sending = 0  # sweeps since then that found it in the middle of sending


class ConnectionWatch:
    """All connections of a server, by their descriptors, which belong to zmq and may be closed at any time."""

    def __init__(self) -> None:
        self._connections: dict[int, ConnectionProgress] = {}

    def begin(self, descriptor: int) -> None:
        """A connection was accepted."""
        try:
            self._connections[descriptor] = ConnectionProgress(os.fstat(descriptor).st_ino)
        except OSError:
            self._connections.pop(descriptor, None)  # already closed

    def end(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)

    def finished(self, descriptor: int) -> None:
        """A whole message came through a connection."""
        progress = self._connections.get(descriptor)
        if progress is not None:
            progress.finished = True

    def sweep(self) -> int:
        """Look at every connection; returns how many were cut."""
        resident, cut = _resident_bytes(), 0
        for descriptor, progress in list(self._connections.items()):
            try:
                own = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                self.end(descriptor)
                continue
            with own:
                if os.fstat(own.fileno()).st_ino != progress.inode:
                    self.end(descriptor)  # the descriptor belongs to something else by now
                elif self._endless(own, progress, resident):
                    LOG.warning("a connection was cut: it sends a message of more than %d bytes", MOST_MESSAGE_BYTES)
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                    own.shutdown(socket.SHUT_RDWR)
                    self.end(descriptor)
                    cut += 1
        return cut

    @staticmethod
    def _endless(own: socket.socket, progress: ConnectionProgress, resident: int) -> bool:
        received = _received_bytes(own)
        if progress.finished:
            progress.finished, progress.received, progress.grown, progress.sending = False, received, resident, 0
            return False
        if own.family == socket.AF_UNIX:
            progress.sending = progress.sending + 1 if _unread_bytes(own) else 0
            sending = progress.sending >= SENDING_SWEEPS
        else:
            sending = received - progress.received > SENDING_BYTES
        grown = resident - progress.grown > MOST_GROWTH_BYTES
        return received - progress.received > MOST_UNFINISHED_BYTES or (sending and grown)


def _received_bytes(own: socket.socket) -> int:
    """Bytes that came through a TCP connection; 0 for a unix socket, which does not count them."""
    if own.family == socket.AF_UNIX:
        return 0
    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < TCP_BYTES_RECEIVED + 8:
        return 0  # a kernel that does not count them
    (received,) = struct.unpack_from("<Q", info, TCP_BYTES_RECEIVED)
    return int(received)


def _unread_bytes(own: socket.socket) -> int:
    (unread,) = struct.unpack("i", fcntl.ioctl(own.fileno(), termios.FIONREAD, bytes(4)))
    return int(unread)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
