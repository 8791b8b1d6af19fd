"""The smallest file system in user space: an empty folder, mounted under the name of another.

For tests of what the kernel's table of mounts says of a place. Linux only, and only as root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from typing import Callable, Union

INIT, GETATTR, STATFS, ACCESS, LOOKUP = 26, 3, 17, 34, 1
_HEADER = struct.Struct("<IIQQIIII")  # length, operation, number, node, uid, gid, pid, padding
_REPLY = struct.Struct("<IiQ")


def serve_empty_folder(folder: str, kind: str) -> Callable[[], None]:
    """Mount it, as ``fuse.<kind>``.

    Args:
        folder: Where.
        kind: What the table of mounts says.

    Returns:
        What unmounts it.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other".encode()
    place = os.fsencode(folder)
    if libc.mount(kind.encode(), place, f"fuse.{kind}".encode(), 0, options) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    thread = threading.Thread(target=_serve, args=(device,), daemon=True)
    thread.start()

    def end() -> None:
        libc.umount2(place, 2)
        thread.join(10)
        os.close(device)

    return end


def _serve(device: int) -> None:
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:  # it is unmounted
            return
        _length, operation, number, _node, *_rest = _HEADER.unpack_from(request)
        answer = _answer(operation)
        if isinstance(answer, int):
            reply = _REPLY.pack(_REPLY.size, -answer, number)
        else:
            reply = _REPLY.pack(_REPLY.size + len(answer), 0, number) + answer
        os.write(device, reply)


def _answer(operation: int) -> Union[bytes, int]:
    if operation == INIT:
        return struct.pack("<IIIIHHIIHHI28x", 7, 26, 0, 0, 1, 1, 4096, 1, 0, 0, 0)
    if operation == GETATTR:
        attributes = struct.pack(
            "<QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, *[0] * 3, 0o40755, 2, *[0] * 5
        )
        return struct.pack("<QII", 1, 0, 0) + attributes
    if operation == STATFS:
        return struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
    if operation == LOOKUP:
        return errno.ENOENT
    return errno.ENOSYS
