"""Counts the bytes that this process has sent through TCP, as the kernel counts them.

Works on Linux, for the sockets of any library.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct

_TCP_INFO_BYTES = 256
_BYTES_SENT_AT = 200
"""Offset of `tcpi_bytes_sent`, then `tcpi_bytes_retrans`, in `struct tcp_info`.

(include/uapi/linux/tcp.h, both since Linux 4.19.)
"""


def bytes_sent() -> int | None:
    """Returns the bytes sent over all open TCP connections, without retransmissions.

    Returns None if the system does not report them.
    """
    total = 0
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    for name in names:
        sent = _sent_by(int(name))
        if sent is None:
            return None
        total += sent
    return total


def _sent_by(descriptor: int) -> int | None:
    """Returns the bytes sent by a descriptor; 0 if it is no TCP connection or is closed."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
            if not is_tcp or copy.type != socket.SOCK_STREAM:
                return 0
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _BYTES_SENT_AT + 16:
            return None
        sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT_AT)
        return sent - again
    return 0
