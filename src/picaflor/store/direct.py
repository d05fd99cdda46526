"""Reading past the page cache (O_DIRECT): which files allow it, in which blocks, and when it pays.

Knows descriptors and file systems; must not know experts, slots or policies.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from picaflor.container.strict_json import show_path
from picaflor.store.files import ShardFiles

DIRECT_MODES = ("auto", "on", "off")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
PAGES_SHARE = 2 / 3
"""Measured with `bench disk` on an NVMe drive: 2.0 GB/s past the page cache, 0.9 through it when cold, about 5 from it:
buffered reads win once two thirds of them are served from memory."""
_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class DirectFiles:
    """What a probe found: `blocks` maps a shard to its block size in bytes, `refused` to the reason why not."""

    blocks: Mapping[int, int]
    refused: Mapping[int, str]


def probe_direct_files(files: ShardFiles, shards: Iterable[int]) -> DirectFiles:
    """Try every shard once: opened anew with O_DIRECT, asked for its block size, read one block. Raises ReadFailed."""
    from picaflor._native import probe_direct

    blocks: dict[int, int] = {}
    refused: dict[int, str] = {}
    for shard in shards:
        path = files.shards[shard].path
        with files.handle(shard) as handle:
            kind = file_system(handle)
            if kind in MEMORY_FILE_SYSTEMS:
                refused[shard] = f"{show_path(path)} lies in memory ({kind})"
                continue
            try:
                opened = reopen_direct(handle, path)
            except OSError as error:
                refused[shard] = f"{show_path(path)}: opening it with O_DIRECT: {error.strerror}"
                continue
        try:
            size, code = probe_direct(opened)
        finally:
            os.close(opened)
        if size:
            blocks[shard] = size
        else:
            refused[shard] = f"{show_path(path)}: reading it with O_DIRECT: {os.strerror(code)}"
    return DirectFiles(blocks, refused)


def reopen_random(handle: int, path: Path) -> int:
    """A new descriptor of the very file that `handle` has open, for reads at random places: without read-ahead, which
    would fetch bytes of other experts. Raises OSError."""
    opened = _reopen(handle, path, 0)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    return opened


def reopen_direct(handle: int, path: Path) -> int:
    """A new descriptor, with O_DIRECT, of the very file that `handle` has open. Raises OSError."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
    return _reopen(handle, path, flag)


def _reopen(handle: int, path: Path, flag: int) -> int:
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | flag
    try:
        return os.open(f"/proc/self/fd/{handle}", flags)
    except FileNotFoundError:
        pass  # no /proc, or the file was removed: by its name then, if that still means the same file
    opened = os.open(path, flags)
    wanted, found = os.fstat(handle), os.fstat(opened)
    if (wanted.st_dev, wanted.st_ino) != (found.st_dev, found.st_ino):
        os.close(opened)
        raise OSError(errno.ESTALE, "another file has this name now")
    return opened


def file_system(handle: int, *, proc: Path = _PROC) -> str:
    """The kind of file system that an open file lies on, as `ext4` or `tmpfs`; empty where the system does not tell."""
    device = os.fstat(handle).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = (proc / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, dash, right = line.partition(" - ")
        words = left.split()
        if dash and len(words) > 2 and words[2] == number:
            return right.split()[0]
    return ""


def direct_pays(*, streamed_bytes: int, spare_bytes: int | None) -> bool:
    """The rule of `--direct auto`: memory that the plan leaves free cannot hold PAGES_SHARE of the experts without a
    slot.

    `streamed_bytes`: bytes of the experts without a slot; `spare_bytes`: memory left to file pages, None where that is
    unknown (then the answer is no: buffered reads are right everywhere).
    """
    return spare_bytes is not None and streamed_bytes > 0 and spare_bytes < PAGES_SHARE * streamed_bytes
