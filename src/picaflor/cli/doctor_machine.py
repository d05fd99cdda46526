"""The checks of `picaflor doctor` that are about the machine: limits, large pages, drives, and what other backends say.

Must not mend anything, and must not know models.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from picaflor import settings as table
from picaflor.cli.model import counted
from picaflor.sizes import format_bytes

Status = Literal["ok", "info", "warn", "fail"]
LEAST_FILES = 1024
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "virtiofs", "ceph", "glusterfs")
_SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Check:
    """One answer. `remedy` is empty exactly where `status` is ok or info."""

    id: str
    status: Status
    detail: str
    remedy: str = ""


def check_threads() -> Check:
    """Processors that this process may run on, and who says so."""
    from picaflor.runtime.plan import backend_part

    granted = backend_part("cpu", "threads").grant()
    detail = f"{counted(granted.count, 'thread')}: {granted}"
    if granted.quotas and min(granted.quotas)[0] < 1:
        return Check("threads", "warn", detail, "less than one processor is granted: raise the quota of this group")
    return Check("threads", "ok", detail)


def check_memory() -> Check:
    """The tightest voice on how much memory this process may use, and all others."""
    from picaflor.store.budget import memory_sources, tightest

    sources = memory_sources(None, held=0)[1:]
    limit = tightest(sources)
    assert limit.nbytes is not None
    others = "; ".join(str(source) for source in sources if source is not limit)
    detail = f"{format_bytes(limit.nbytes)} may be used, says the {limit.name} ({limit.detail}); {others}"
    if limit.nbytes < 1 << 30:
        return Check("memory", "warn", detail, "large models will be slow: free memory or raise the limit")
    unknown = [source.name for source in sources if source.unknown]
    if unknown:
        return Check("memory", "warn", detail, f"give --ram, as the limit of {', '.join(unknown)} cannot be read")
    return Check("memory", "ok", detail)


def check_open_files() -> Check:
    """Many shards need many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{counted(soft, 'file')} may be open ({hard} at most)"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        return Check("open-files", "warn", detail, f"models of many shards want more: ulimit -n {4 * LEAST_FILES}")
    return Check("open-files", "ok", detail)


def check_locked_memory() -> Check:
    """How much memory may be locked; an io_uring and GPU drivers lock some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "any amount" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return Check("locked-memory", "info", f"{size} may be locked; this version locks none of its own")


def check_huge_pages(*, sys: Path = _SYS) -> Check:
    """Whether the system gives large pages to memory that asks for them."""
    path = sys / "kernel/mm/transparent_hugepage/enabled"
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return Check("huge-pages", "info", f"{path} cannot be read: it is not known whether there are large pages")
    mode = text.partition("[")[2].partition("]")[0] or text.strip()
    if mode == "never":
        return Check("huge-pages", "warn", "large pages are switched off", f"echo madvise > {path} (as root)")
    return Check("huge-pages", "ok", f"large pages: {mode}")


def check_uring() -> Check:
    """Whether reads may go through an io_uring."""
    from picaflor import _native

    code = _native.uring_error()
    if code:
        return Check("io-uring", "info", f"not available ({os.strerror(code)}): reads go through threads")
    return Check("io-uring", "ok", "can be used (--read-engine io_uring)")


def check_state() -> Check:
    """Whether what is measured and learned can be kept."""
    folder = table.state_folder()
    if folder is None:
        return Check("state", "warn", "no folder for state", "set XDG_STATE_HOME or HOME")
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        return Check("state", "warn", f"{place} cannot be written", "make it writable, or set XDG_STATE_HOME")
    return Check("state", "ok", f"kept in {folder}")


def check_backend(name: str) -> Check:
    """Start a backend other than the CPU for real; that it cannot start is no fault of a machine without the device.

    Where it does not, the command that brings its software is told; its driver is the system's matter.
    """
    from picaflor.errors import PicaflorError
    from picaflor.runtime.devices import INSTALL
    from picaflor.runtime.plan import EngineOptions, load_backend

    try:
        backend = load_backend(EngineOptions(backend=name), lambda text: None)
    except (PicaflorError, OSError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        return Check(f"backend.{name}", "info", f"does not start: {reason}; its software: {INSTALL[name]}")
    return Check(f"backend.{name}", "ok", f"started: {getattr(backend, 'described', backend.isa)}")


def check_storage(path: Path, *, extra_dirs: Sequence[Path] = (), sys: Path = _SYS) -> Check:
    """What a model's directory lies on: file system, kind of drive, whether reads may pass the page cache by."""
    from picaflor.container.index import Container
    from picaflor.store.direct import file_system, probe_direct_files

    with Container.open(path, extra_dirs=extra_dirs, headers_only=True) as container:
        with container.handle(0) as handle:
            kind = file_system(handle) or "file system not told"
        direct = probe_direct_files(container, range(len(container.shards)))
    words = [kind, *_drive(path.stat().st_dev, sys)]
    sizes = sorted(set(direct.blocks.values()))
    if direct.refused:
        words.append(f"O_DIRECT refused by {counted(len(direct.refused), 'file')}")
    if sizes:
        words.append(f"O_DIRECT in blocks of {', '.join(format_bytes(size) for size in sizes)}")
    detail = ", ".join(words)
    if kind in REMOTE:
        return Check("model.storage", "warn", detail, "copy the model to a local drive: experts are read at random")
    return Check("model.storage", "ok", detail)


def _drive(device: int, sys: Path) -> list[str]:
    """Words on a block device, from what the system says of it or of the disk that it is a part of."""
    folder = sys / "dev/block" / f"{os.major(device)}:{os.minor(device)}"
    for place in (folder, folder.resolve().parent if folder.exists() else folder):
        try:
            rotational = (place / "queue/rotational").read_text(encoding="ascii").strip()
        except OSError:
            continue
        return [_ROTATION.get(rotational, f"rotational {rotational}")]
    return ["drive not told"]


_ROTATION: Mapping[str, str] = {"0": "solid state", "1": "said to rotate (virtual drives often are)"}
