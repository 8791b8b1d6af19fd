"""What kind of file system a path lies on, by Linux's table of mounts.

An SQLite store needs locks and shared memory that every process with the file shares. A file
system that several hosts mount has neither, and nothing fails: two instances win one run. So it
is refused by its name. A name that is not known here, and a platform without the table, say
nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Optional

MOUNTS = Path("/proc/self/mountinfo")

# What several hosts may mount at a time.
_NETWORK = frozenset(
    {
        "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fhgfs", "gfs2", "glusterfs",
        "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2",
        "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip
_NETWORK_BY_FUSE = frozenset(
    {
        "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "curlftpfs", "davfs", "davfs2", "gcsfuse",
        "glusterfs", "goofys", "gvfsd-fuse", "juicefs", "lizardfs", "mfs", "moosefs",
        "objectivefs", "rclone", "s3fs", "seaweedfs", "smbnetfs", "sshfs", "xtreemfs",
    }
)  # fmt: skip
# What a virtual machine or a container shares with the system it runs in, on one host.
_SHARED = frozenset({"9p", "drvfs", "fakeowner", "hgfs", "prl_fs", "vboxsf", "virtiofs", "vmhgfs"})
_SHARED_BY_FUSE = frozenset({"grpcfuse", "osxfs", "vmhgfs-fuse"})


class Mount(NamedTuple):
    """One line of the table.

    Attributes:
        device: Device number as ``major:minor``.
        point: Where it is mounted.
        kind: Name of the file system, such as ``ext4`` or ``fuse.sshfs``.
    """

    device: str
    point: str
    kind: str

    @property
    def is_network(self) -> bool:
        """Tell whether several hosts may write to it."""
        return self.kind in _NETWORK or self._by_fuse in _NETWORK_BY_FUSE

    @property
    def is_shared(self) -> bool:
        """Tell whether another system on the same host may write to it."""
        return self.kind in _SHARED or self._by_fuse in _SHARED_BY_FUSE

    @property
    def _by_fuse(self) -> str:
        family, _, name = self.kind.partition(".")
        return name if family in ("fuse", "fuseblk") else ""


def read_mounts() -> list[Mount]:
    """Return the mounts that this process sees; none where the platform does not tell."""
    try:
        return parse(os.fsdecode(MOUNTS.read_bytes()))
    except OSError:
        return []


def parse(text: str) -> list[Mount]:
    """Read the table, leaving out lines that are not understood."""
    found: list[Mount] = []
    for line in text.split("\n"):
        head, separator, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.partition(" ")[0]
        if separator and len(fields) > 4 and kind:  # noqa: PLR2004 - see proc(5)
            found.append(Mount(fields[2], _plain(fields[4]), kind))
    return found


def _plain(field: str) -> str:
    """Undo the escapes of a field: octal numbers for bytes such as a space."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def mount_of(mounts: Iterable[Mount], path: str, device: Optional[int]) -> Optional[Mount]:
    """Return the mount that a path lies on.

    Args:
        mounts: The table.
        path: Absolute, without symbolic links.
        device: Device number of the file or its folder; it tells apart what is mounted in one
            place, where a mount in an upper folder hides another below.
    """
    above = [mount for mount in mounts if _is_in(path, mount.point)]
    if device is not None:
        number = f"{os.major(device)}:{os.minor(device)}"
        # btrfs shows another number to stat() than in the table, hence no match is no error.
        above = [mount for mount in above if mount.device == number] or above
    best: Optional[Mount] = None
    for mount in above:  # of several in one place the last one is on top
        if best is None or len(mount.point) >= len(best.point):
            best = mount
    return best


def _is_in(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")
