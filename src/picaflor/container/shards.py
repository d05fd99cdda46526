"""Which files make up a container: search directories, shard names, and the cross-check with an index file.

Knows directories and names; must not read tensors. What is refused and why: docs/container.md, "Shards and index".
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from picaflor.container.strict_json import parse_object, show, show_path
from picaflor.errors import BadContainer

MAX_SHARDS = 512
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256_000_000
_SUFFIX = ".safetensors"
_COUNTED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
# Shard names of the C engine's converter, which writes no index.
_CONVERTER = re.compile(r"out-(mtp-|idx-|fp8pass-)?\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A parsed `model.safetensors.index.json`: tensor name -> shard file name."""

    path: Path
    weight_map: Mapping[str, str]

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Distinct shard file names, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


def find_shards(directory: Path, extra_dirs: Sequence[Path]) -> list[Path]:
    """All shard paths of a model, sorted by full path.

    A file name that an earlier directory has is skipped in later ones; names that start with a dot are no shards.
    Raises BadContainer for a path that is missing or no directory, for none and for more than MAX_SHARDS shards.
    """
    found: dict[str, Path] = {}
    listing: list[str] = []
    for folder in (directory, *extra_dirs):
        names = _names(folder)
        listing += names if folder is directory else []
        for name in names:
            if name.endswith(_SUFFIX) and not name.startswith("."):
                found.setdefault(name, folder / name)
    if not found:
        seen = ", ".join(show_path(name) for name in sorted(listing)[:6]) or "nothing"
        more = f" and {len(listing) - 6} more" if len(listing) > 6 else ""
        raise BadContainer(f"{show_path(directory)}: no *{_SUFFIX} file here; found {seen}{more}")
    if len(found) > MAX_SHARDS:
        raise BadContainer(f"{show_path(directory)}: {len(found)} shards, at most {MAX_SHARDS} are accepted")
    return sorted(found.values(), key=str)


def _names(folder: Path) -> list[str]:
    """Names in a directory. Raises BadContainer if it is none or cannot be listed."""
    where = show_path(folder)
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        link = " (a dangling link)" if folder.is_symlink() else ""
        raise BadContainer(f"{where}: no such directory{link}; expected a model directory") from None
    except NotADirectoryError:
        hint = f"; give its directory {show_path(folder.parent)}" if folder.name.endswith(_SUFFIX) else ""
        raise BadContainer(f"{where}: is a file, expected a model directory{hint}") from None
    except OSError as error:
        raise BadContainer(f"{where}: cannot be listed: {error.strerror}") from None


def read_index(directory: Path) -> IndexFile | None:
    """The directory's index file, or None where there is none. Raises BadContainer if it is malformed."""
    path = directory / INDEX_NAME
    data = read_small_file(path, MAX_INDEX_BYTES)
    if data is None:
        return None
    where = show_path(path)
    weight_map = parse_object(data, where).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadContainer(f"{where}: weight_map: expected an object of file names, found {show(weight_map)}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard != os.path.basename(shard) or not shard.endswith(_SUFFIX):
            raise BadContainer(
                f"{where}: tensor {show(name)}: expected the name of a *{_SUFFIX} file in this directory, found "
                f"{show(shard)}"
            )
    return IndexFile(path, weight_map)


def read_small_file(path: Path, limit: int) -> bytes | None:
    """A side file's bytes, or None if it is not there. Raises BadContainer when it is larger than `limit` bytes."""
    where = show_path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadContainer(f"{where}: expected a regular file, found something else")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise BadContainer(f"{where}: {size} bytes, at most {limit} are accepted")
            data = file.read(size + 1)
    except FileNotFoundError:
        if path.is_symlink():
            target = show_path(os.readlink(path))
            raise BadContainer(f"{where}: dangling link: its target {target} does not exist") from None
        return None
    except OSError as error:
        raise BadContainer(f"{where}: cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise BadContainer(f"{where}: more than {limit} bytes")
    return data


def missing_by_name(names: Iterable[str]) -> tuple[str, ...]:
    """Shards that names like `model-00001-of-00004.safetensors` declare and that are not among `names`."""
    present = set(names)
    sets = {(match["stem"], match["total"]) for match in map(_COUNTED.fullmatch, present) if match}
    missing: list[str] = []
    for stem, total in sorted(sets):
        count = int(total)
        if count > MAX_SHARDS:
            missing.append(f"{stem}-*-of-{total}{_SUFFIX}")
            continue
        wanted = (f"{stem}-{number:05d}-of-{total}{_SUFFIX}" for number in range(1, count + 1))
        missing += [name for name in wanted if name not in present]
    return tuple(missing)


def declared_count(names: Iterable[str], index: IndexFile | None) -> int:
    """How many shards the names (and the index) say there should be; at least those that are here."""
    present = set(names)
    return len(present | set(missing_by_name(present)) | set(index.shard_names if index else ()))


def index_belongs(index: IndexFile, names: Iterable[str]) -> bool:
    """Whether an index describes these shards.

    It does not when it names none of them and all of them carry the C converter's names: then it was copied over with
    the other small files of the original checkpoint.
    """
    present = set(names)
    return bool(present & set(index.shard_names)) or not all(_CONVERTER.fullmatch(name) for name in present)


def refuse_missing(where: Path, missing: Sequence[str], present: int, source: str) -> None:
    """Raise BadContainer naming the missing shards, if there are any."""
    if missing:
        some = ", ".join(show_path(name) for name in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise BadContainer(
            f"{show_path(where)}: {len(missing)} of {present + len(missing)} shards missing: {some}{more} "
            f"({source}); fetch them"
        )


def refuse_stray(index: IndexFile, names: Iterable[str]) -> None:
    """Raise BadContainer for a shard that the index does not name."""
    known = set(index.shard_names)
    for name in sorted(names):
        if name not in known:
            raise BadContainer(
                f"{show_path(index.path.parent / name)}: stray shard: {INDEX_NAME} does not name it; move it away, or "
                "remove an index that is out of date"
            )


def check_index(index: IndexFile, names: Iterable[str], holders: Mapping[str, str]) -> int:
    """Compare the index with the headers; `names` are the shards, `holders` maps tensor name -> name of its shard.

    Entries of shards that are not here are left out. Returns how many tensors of the headers the index does not list.
    Raises BadContainer for a stale entry, naming tensor, shard, and where the tensor is.
    """
    present = set(names)
    for name, shard in index.weight_map.items():
        holder = holders.get(name)
        if holder != shard and (shard in present or holder is not None):
            found = f"it is in {show_path(holder)}" if holder is not None else "no shard has it"
            raise BadContainer(
                f"{show_path(index.path)}: stale index: tensor {show(name)} should be in {show_path(shard)}, but "
                f"{found}"
            )
    return sum(1 for name in holders if name not in index.weight_map)
