"""What the table of mounts says of a path, and what is refused or warned about because of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Optional
from unittest import mock

import pytest

from leasecron_sync.backends import _sqlite_mounts
from leasecron_sync.backends._sqlite_mounts import Mount, mount_of, parse, read_mounts
from leasecron_sync.backends._sqlite_place import check_place
from leasecron_sync.errors import StoreUnsupported

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 27 0:50 / /home rw,nosuid shared:20 master:3 - nfs4 files:/home rw,vers=4.2,addr=10.0.0.1
41 40 0:51 / /home/local rw - tmpfs tmpfs rw
42 27 0:52 / /mnt/with\040space rw - cifs //files/share rw
43 27 0:53 / /mnt/back\134slash rw - fuse.sshfs me@host:/ rw
44 27 0:54 / /srv rw - 9p shared rw
45 27 0:55 / /top rw - nfs old:/ rw
46 27 0:56 / /top rw - ext4 /dev/vdb rw
47 27 0:57 / /low/deep rw - nfs hidden:/ rw
48 27 0:58 / /low rw - xfs /dev/vdc rw
49 27 254:0 /data/jobs.db /app/jobs.db rw - ext4 /dev/vda rw
50 27 0:60 / /kind rw -
51 27 0:61
no line at all
"""
MOUNTS = parse(TABLE)


def kind_at(path: str, device: Optional[int] = None) -> str:
    found = mount_of(MOUNTS, path, device)
    assert found is not None
    return found.kind


def test_lines_that_are_not_understood_are_left_out() -> None:
    assert len(MOUNTS) == 12
    assert MOUNTS[0] == Mount("0:21", "/proc", "proc")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/jobs.db", "ext4"),
        ("/home/jobs.db", "nfs4"),
        ("/homely/jobs.db", "ext4"),
        ("/home", "nfs4"),
        ("/home/local/jobs.db", "tmpfs"),
        ("/home/locally/jobs.db", "nfs4"),
        ("/mnt/with space/jobs.db", "cifs"),
        ("/mnt/back\\slash/jobs.db", "fuse.sshfs"),
        ("/top/jobs.db", "ext4"),
        ("/app/jobs.db", "ext4"),
    ],
)
def test_the_deepest_and_last_mount_above_a_path_is_its_own(path: str, kind: str) -> None:
    assert kind_at(path) == kind


def test_a_mount_that_another_one_hides_is_told_apart_by_the_device() -> None:
    assert kind_at("/low/deep/jobs.db") == "nfs"
    assert kind_at("/low/deep/jobs.db", os.makedev(0, 58)) == "xfs"
    assert kind_at("/low/deep/jobs.db", os.makedev(9, 9)) == "nfs", "as btrfs: in no line"


def test_without_a_table_nothing_is_known() -> None:
    assert mount_of([], "/jobs.db", None) is None
    with mock.patch.object(_sqlite_mounts, "MOUNTS", Path("/no/such/table")):
        assert read_mounts() == []


NETWORK = ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse.sshfs", "fuse.glusterfs"]
SHARED = ["9p", "virtiofs", "vboxsf", "fuse.grpcfuse", "fakeowner"]
LOCAL = ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "apfs", "fuse", "fuse.x"]


@pytest.mark.parametrize("kind", [*NETWORK, *SHARED, *LOCAL])
def test_a_kind_of_file_system_is_for_hosts_for_systems_on_one_host_or_for_one(kind: str) -> None:
    mount = Mount("0:1", "/", kind)
    assert (mount.is_network, mount.is_shared) == (kind in NETWORK, kind in SHARED)


def with_mount(folder: Path, kind: str, point: Path) -> list[Mount]:
    number = folder.stat().st_dev
    return [Mount(f"{os.major(number)}:{os.minor(number)}", str(point), kind)]


@pytest.mark.parametrize("kind", NETWORK)
def test_a_network_file_system_is_refused_with_its_kind_and_what_to_do(
    tmp_path: Path, kind: str
) -> None:
    table = mock.patch(
        "leasecron_sync.backends._sqlite_place.read_mounts",
        return_value=with_mount(tmp_path, kind, tmp_path),
    )
    path = str(tmp_path / "jobs.db")
    text = f"{re.escape(repr(path))} lies on a network file system \\({kind}, .*put it on a disk of"
    with table, pytest.raises(StoreUnsupported, match=text) as caught:
        check_place(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", SHARED)
def test_a_folder_shared_on_one_host_is_warned_about(tmp_path: Path, kind: str) -> None:
    mounts = with_mount(tmp_path, kind, tmp_path)
    with mock.patch("leasecron_sync.backends._sqlite_place.read_mounts", return_value=mounts):
        [warning] = check_place(str(tmp_path / "jobs.db"))
    assert f"({kind}, mounted on {str(tmp_path)!r})" in warning
    assert "\n" not in warning


def test_a_local_file_system_is_nothing_to_speak_of(tmp_path: Path) -> None:
    mounts = with_mount(tmp_path, "ext4", tmp_path)
    with mock.patch("leasecron_sync.backends._sqlite_place.read_mounts", return_value=mounts):
        assert check_place(str(tmp_path / "jobs.db")) == ()


def test_the_mount_is_that_of_what_a_symbolic_link_leads_to(tmp_path: Path) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    near.mkdir()
    (near / "jobs.db").symlink_to(far / "jobs.db")
    (far / "own.db").symlink_to(near / "own.db")
    mounts = with_mount(tmp_path, "ext4", Path("/")) + with_mount(tmp_path, "nfs", far)
    with mock.patch("leasecron_sync.backends._sqlite_place.read_mounts", return_value=mounts):
        with pytest.raises(StoreUnsupported, match="network"):
            check_place(str(near / "jobs.db"))
        assert check_place(str(far / "own.db")) == ()


def test_a_file_that_is_mounted_without_its_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.touch()
    mounts = with_mount(tmp_path, "ext4", path)
    table = mock.patch("leasecron_sync.backends._sqlite_place.read_mounts", return_value=mounts)
    with table, pytest.raises(StoreUnsupported, match=r"is mounted by itself.*mount its folder"):
        check_place(str(path))
