"""The hostile corpus: every bad container, built by a few lines, with the error that it must give.

Knows how to write broken files; the reader under test is never used here.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picaflor.errors import BadContainer, PicaflorError

Build = Callable[[Path], None]
INDEX = "model.safetensors.index.json"


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    """A header entry; nothing is checked."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A shard of the given header text; `length` overrides the length prefix."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def shard(entries: Mapping[str, Any], data: bytes = bytes(64), metadata: Any = None) -> bytes:
    """A shard of header entries."""
    fields = dict(entries) if metadata is None else {"__metadata__": metadata, **entries}
    return raw(json.dumps(fields).encode(), data)


GOOD = shard({"w": entry("F32", [2, 2], 0, 16)}, bytes(16))


@dataclass(frozen=True)
class Case:
    """One bad directory: `parts` must all stand in the message of exactly the class `error`."""

    name: str
    build: Build
    parts: tuple[str, ...]
    error: type[PicaflorError] = BadContainer


def one(data: bytes, name: str = "a.safetensors") -> Build:
    """A directory with one shard."""
    return lambda folder: many({name: data})(folder)


def many(files: Mapping[str, bytes | str]) -> Build:
    """A directory of files."""

    def build(folder: Path) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return build


def tensor(value: Any, data: bytes = bytes(64)) -> Build:
    """A shard with one tensor called w whose entry is `value`."""
    return one(shard({"w": value}, data))


def index(weight_map: Any, files: Mapping[str, bytes]) -> Build:
    """Shards with an index file."""
    return many({INDEX: json.dumps({"weight_map": weight_map}), **files})


def stamps(*texts: Any) -> Build:
    """One shard per stamp text, as `colibri.fmt` of its metadata."""
    return many(
        {
            f"{number}.safetensors": shard(
                {f"t{number}": entry("U8", [4], 0, 4)}, bytes(4), metadata={"colibri.fmt": text}
            )
            for number, text in enumerate(texts)
        }
    )


def _dangling(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(GOOD)
    os.symlink(folder / "blobs" / "gone", folder / "b.safetensors")


def _directory(folder: Path) -> None:
    (folder / "x.safetensors").mkdir()


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "x.safetensors")


def _loop(folder: Path) -> None:
    os.symlink(folder / "x.safetensors", folder / "x.safetensors")


def _crowd(folder: Path) -> None:
    for number in range(513):
        (folder / f"{number:04d}.safetensors").write_bytes(b"")


HUGE = 1 << 63
_W = 'a.safetensors: tensor "w": '
_SPAN = bytes(64)
_TWICE = '{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
_INNER = '{"w":{"dtype":"U8","dtype":"F32","shape":[4],"data_offsets":[0,4]}}'

PREFIX = [
    Case("empty-file", one(b""), ("a.safetensors: truncated", "8-byte header length, the file has 0 bytes")),
    Case("five-bytes", one(b"12345"), ("a.safetensors: truncated", "the file has 5 bytes", "fetch it again")),
    Case("length-2^63-1", one(raw(b"{}", length=HUGE - 1)), (f"claims {HUGE - 1} bytes, at most 536870912",)),
    Case("length-2^63", one(raw(b"{}", length=HUGE)), (f"claims {HUGE} bytes, at most 536870912", "the file has 10")),
    Case("length-2^64-1", one(raw(b"{}", length=2 * HUGE - 1)), (f"claims {2 * HUGE - 1} bytes",)),
    Case("length-one-too-long", one(raw(b"{}", length=3)), ("truncated", "claims 3 bytes", "holds only 2 after")),
    Case("cut-in-header", one(GOOD[:20]), ("truncated", "claims 65 bytes", "holds only 12 after", "fetch it again")),
    Case("length-0", one(raw(b"")), ("a.safetensors: header: not valid JSON",)),
]

JSON = [
    Case("not-json", one(raw(b"hello")), ("header: not valid JSON: Expecting value",)),
    Case("pickle", one(raw(b"\x80\x04\x95")), ("header: not UTF-8 at byte 0 (found 0x80)",)),
    Case("not-utf8", one(raw(b'{"\xff":1}')), ("header: not UTF-8 at byte 2 (found 0xff)",)),
    Case("utf16", one(raw("{}".encode("utf-16"))), ("header: not UTF-8 at byte 0",)),
    Case("bom", one(raw(b"\xef\xbb\xbf{}")), ("header: not valid JSON",)),
    Case("array", one(raw(b"[1]")), ("header: expected a JSON object, found [1]",)),
    Case("number", one(raw(b"7")), ("header: expected a JSON object, found 7",)),
    Case("unquoted-key", one(raw(b'{w:{"dtype":"U8"}}')), ("header: not valid JSON", "property name enclosed")),
    Case("number-key", one(raw(b'{1:{"dtype":"U8"}}')), ("header: not valid JSON", "property name enclosed")),
    Case("trailing-text", one(raw(b"{} {}")), ("header: not valid JSON: Extra data",)),
    Case("nul-behind", one(raw(b"{}\0\0")), ("header: not valid JSON: Extra data",)),
    Case("nested-lists", one(raw(b"[" * 300_000)), ("header: nested too deeply",)),
    Case("nested-objects", one(raw(b'{"a":' * 300_000)), ("header: nested too deeply",)),
    Case("digits", one(raw(b'{"w":' + b"9" * 5000 + b"}")), ("header: not valid JSON: Exceeds the limit",)),
    Case("name-twice", one(raw(_TWICE.encode(), _SPAN)), ('the name "w" stands twice', "[0, 4]", "[4, 8]")),
    Case("key-twice", one(raw(_INNER.encode(), _SPAN)), ('the name "dtype" stands twice', '"U8" and with "F32"')),
    Case("nan-dim", one(raw(b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}')), ("NaN is not a JSON value",)),
    Case(
        "infinite-dim",
        one(raw(b'{"w":{"dtype":"U8","shape":[-Infinity],"data_offsets":[0,4]}}')),
        ("header: not valid JSON: -Infinity is not a JSON value",),
    ),
    Case(
        "metadata-list", one(shard({}, metadata=["x"])), ("__metadata__: expected an object of strings, found ['x']",)
    ),
    Case("metadata-number", one(shard({}, metadata={"k": 3})), ('__metadata__ entry "k": expected a string, found 3',)),
]

ENTRIES = [
    Case("entry-is-list", tensor([1, 2]), (_W + "expected an object with dtype", "found [1, 2]")),
    Case(
        "no-dtype", tensor({"shape": [1], "data_offsets": [0, 4]}), (_W + "dtype: expected one of BF16", "found none")
    ),
    Case("dtype-unknown", tensor(entry("Q4_K", [1], 0, 4)), (_W + "dtype: expected one of", 'found "Q4_K"')),
    Case("dtype-number", tensor(entry(32, [1], 0, 4)), (_W + "dtype: expected one of", "found 32")),
    Case("dtype-list", tensor(entry(["F32"], [1], 0, 4)), (_W + "dtype: expected one of", "found ['F32']")),
    Case("no-shape", tensor({"dtype": "U8", "data_offsets": [0, 4]}), (_W + "shape: expected a list", "found none")),
    Case("shape-number", tensor(entry("U8", 4, 0, 4)), (_W + "shape: expected a list of integers, found 4",)),
    Case(
        "dim-negative", tensor(entry("F32", [-1], 0, 4)), (_W + "shape: expected integers from 0", "found -1 in [-1]")
    ),
    Case("dims-negative", tensor(entry("F32", [-1, -1], 0, 4)), (_W + "shape: expected integers", "found -1")),
    Case("dim-float", tensor(entry("F32", [1.0], 0, 4)), (_W + "shape: expected integers", "found 1.0")),
    Case(
        "dim-huge-float", one(raw(b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', _SPAN)), ("found inf",)
    ),
    Case("dim-bool", tensor(entry("F32", [True], 0, 4)), (_W + "shape: expected integers", "found True")),
    Case("dim-string", tensor(entry("F32", ["1"], 0, 4)), (_W + "shape: expected integers", 'found "1"')),
    Case("dim-null", tensor(entry("F32", [None], 0, 4)), (_W + "shape: expected integers", "found None")),
    Case("dim-2^63", tensor(entry("U8", [HUGE], 0, 4)), (_W + "shape: expected integers from 0 to 2^63-1", f"{HUGE}")),
    Case("dim-10^200", tensor(entry("U8", [10**200], 0, 4)), (_W + "shape: expected integers", "(201 characters)")),
    Case("rank-9", tensor(entry("F32", [1] * 9, 0, 4)), (_W + "shape: expected at most 8 dimensions, found 9",)),
    Case("product", tensor(entry("F32", [1 << 32, 1 << 31], 0, 4)), (_W, "the number of elements is 2^63 or more")),
    Case("product-u8", tensor(entry("U8", [1 << 62, 2], 0, 4)), (_W, "the number of elements is 2^63 or more")),
    Case("wraps-to-1", tensor(entry("F32", [(1 << 62) + 1, 4], 0, 16)), (_W, "the number of elements is 2^63 or more")),
    Case(
        "no-offsets", tensor({"dtype": "U8", "shape": [4]}), (_W + "data_offsets: expected two integers, found none",)
    ),
    Case(
        "offsets-3",
        tensor({"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}),
        (_W + "data_offsets: expected two integers, found [0, 4, 8]",),
    ),
    Case("offset-float", tensor(entry("U8", [4], 0, 4.0)), (_W + "data_offsets: expected two integers", "[0, 4.0]")),
    Case("offset-bool", tensor(entry("U8", [4], False, 4)), (_W + "data_offsets: expected two integers", "[False, 4]")),
    Case(
        "offset-negative", tensor(entry("U8", [4], -4, 0)), (_W + "data_offsets: expected 0 <= begin <= end", "[-4, 0]")
    ),
    Case(
        "offset-reversed", tensor(entry("U8", [4], 8, 4)), (_W + "data_offsets: expected 0 <= begin <= end", "[8, 4]")
    ),
    Case("offset-outside", tensor(entry("F32", [17], 0, 68)), (_W + "data_offsets end at 68", "holds 64 data bytes")),
    Case("offset-2^64", tensor(entry("U8", [4], 0, 2 * HUGE)), (_W + f"data_offsets end at {2 * HUGE}", "holds 64")),
    Case("cut-in-data", one(GOOD[:-1]), (_W + "data_offsets end at 16", "the file holds 15 data bytes", "truncated")),
    Case("span-short", tensor(entry("F32", [8, 8], 0, 64)), (_W + "shape [8, 8] of F32 needs 256 bytes", "span 64")),
    Case("span-long", tensor(entry("F32", [2], 0, 64)), (_W + "shape [2] of F32 needs 8 bytes, data_offsets span 64",)),
    Case("span-bf16", tensor(entry("BF16", [8], 0, 32)), (_W + "shape [8] of BF16 needs 16 bytes", "span 32")),
    Case("span-fp8", tensor(entry("F8_E4M3", [8], 0, 9)), (_W + "shape [8] of F8_E4M3 needs 8 bytes", "span 9")),
    Case("span-scalar", tensor(entry("F32", [], 0, 8)), (_W + "shape [] of F32 needs 4 bytes", "span 8")),
    Case(
        "overlap",
        one(shard({"b": entry("F32", [4], 8, 24), "a": entry("F32", [4], 0, 16)})),
        ('a.safetensors: overlapping data_offsets: "a" [0, 16) and "b" [8, 24)',),
    ),
    Case(
        "overlap-of-one-byte",
        one(shard({"a": entry("U8", [9], 0, 9), "b": entry("U8", [8], 8, 16)})),
        ('overlapping data_offsets: "a" [0, 9) and "b" [8, 16)',),
    ),
    Case(
        "same-span",
        one(shard({"a": entry("U8", [9], 0, 16), "b": entry("U8", [4], 0, 16)})),
        ('overlapping data_offsets: "a" [0, 16) and "b" [0, 16)',),
    ),
    Case(
        "span-inside",
        one(shard({"a": entry("U8", [64], 0, 64), "b": entry("U8", [4], 8, 12), "c": entry("U8", [4], 20, 24)})),
        ('overlapping data_offsets: "a" [0, 64) and "b" [8, 12)',),
    ),
    Case(
        "padding-over-data",
        one(shard({"a": entry("U8", [64], 0, 64), "__pad__.0": entry("U8", [4], 60, 64)})),
        ('overlapping data_offsets: "a" [0, 64) and "__pad__.0" [60, 64)',),
    ),
    Case(
        "padding-f32", one(shard({"__pad__.0": entry("F32", [1], 0, 4)})), ("padding is expected to be U8, found F32",)
    ),
    Case(
        "escapes-in-name",
        one(shard({"w\n\x1b[31m\ud800": entry("F32", [1], 0, 8)})),
        ('tensor "w\\n\\u001b[31m\\ud800": shape [1] of F32 needs 4 bytes',),
    ),
    Case("long-name", one(shard({"n" * 10**6: entry("F32", [1], 0, 8)})), ('tensor "nnnn', '...": shape [1]')),
]

SETS = [
    Case(
        "name-in-two-shards",
        many({"a.safetensors": GOOD, "b.safetensors": GOOD}),
        ('b.safetensors: tensor "w" is also in ', "a.safetensors; expected each tensor in one shard"),
    ),
    Case("no-shards", many({"pytorch_model.bin": b"x"}), ("no *.safetensors file here; found pytorch_model.bin",)),
    Case("empty-directory", many({}), ("no *.safetensors file here; found nothing",)),
    Case("hidden-only", one(GOOD, ".a.safetensors"), ("no *.safetensors file here; found .a.safetensors",)),
    Case("dangling-link", _dangling, ("b.safetensors: dangling link: its target", "blobs/gone does not exist")),
    Case("shard-is-directory", _directory, ("x.safetensors: expected a regular file, found a directory",)),
    Case("shard-is-pipe", _pipe, ("x.safetensors: expected a regular file, found a device or pipe",)),
    Case("link-loop", _loop, ("x.safetensors: cannot be opened",)),
    Case("513-shards", _crowd, ("513 shards, at most 512 are accepted",)),
    Case(
        "name-declares-more",
        one(GOOD, "model-00002-of-00003.safetensors"),
        ("2 of 3 shards missing: model-00001-of-00003.safetensors, model-00003-of-00003.safetensors",),
    ),
    Case(
        "name-declares-99999",
        one(GOOD, "model-00002-of-99999.safetensors"),
        ("1 of 2 shards missing: model-*-of-99999.safetensors",),
    ),
    Case(
        "index-missing-shard",
        index({"w": "a.safetensors", "v": "b.safetensors"}, {"a.safetensors": GOOD}),
        ("1 of 2 shards missing: b.safetensors (model.safetensors.index.json names them)",),
    ),
    Case(
        "index-stale",
        index({"w": "a.safetensors", "v": "a.safetensors"}, {"a.safetensors": GOOD}),
        ('stale index: tensor "v" should be in a.safetensors, but no shard has it',),
    ),
    Case(
        "index-moved",
        index({"w": "b.safetensors"}, {"a.safetensors": GOOD, "b.safetensors": shard({})}),
        ("a.safetensors: stray shard: model.safetensors.index.json does not name it",),
    ),
    Case(
        "index-swapped",
        index(
            {"w": "b.safetensors", "v": "a.safetensors"},
            {"a.safetensors": GOOD, "b.safetensors": shard({"v": entry("U8", [4], 0, 4)})},
        ),
        ('stale index: tensor "w" should be in b.safetensors, but it is in a.safetensors',),
    ),
    Case(
        "index-empty-shard",
        index({"w": "a.safetensors", "v": "b.safetensors"}, {"a.safetensors": GOOD, "b.safetensors": shard({})}),
        ('stale index: tensor "v" should be in b.safetensors, but no shard has it',),
    ),
    Case(
        "stray-shard",
        index({"w": "a.safetensors"}, {"a.safetensors": GOOD, "c.safetensors": shard({})}),
        ("c.safetensors: stray shard", "move it away"),
    ),
    Case(
        "index-path",
        index({"w": "../a.safetensors"}, {"a.safetensors": GOOD}),
        ('index.json: tensor "w": expected the name of a *.safetensors file', 'found "../a.safetensors"'),
    ),
    Case("index-number", index({"w": 3}, {"a.safetensors": GOOD}), ('index.json: tensor "w": expected', "found 3")),
    Case(
        "index-no-map", index([], {"a.safetensors": GOOD}), ("weight_map: expected an object of file names, found []",)
    ),
    Case("index-not-json", many({"a.safetensors": GOOD, INDEX: "{"}), (f"{INDEX}: not valid JSON",)),
    Case(
        "index-twice",
        many({"a.safetensors": GOOD, INDEX: '{"weight_map":{"w":"a.safetensors","w":"b.safetensors"}}'}),
        (f'{INDEX}: the name "w" stands twice', '"a.safetensors" and with "b.safetensors"'),
    ),
]

_MANY = json.dumps({f"t{number}": "int8-row" for number in range(4097)})
STAMPS = [
    Case("stamp-not-json", stamps("{nope"), ("0.safetensors: colibri.fmt: not valid JSON",)),
    Case("stamp-list", stamps('["int8-row"]'), ("0.safetensors: colibri.fmt: expected a JSON object of format names",)),
    Case("stamp-string", stamps('"int8-row"'), ("0.safetensors: colibri.fmt: expected a JSON object of format names",)),
    Case(
        "stamp-number", stamps('{"w": 8}'), ('0.safetensors: colibri.fmt: tensor "w": expected a format name, found 8',)
    ),
    Case("stamp-nested", stamps("[" * 300_000), ("0.safetensors: colibri.fmt: not valid JSON: nested too deeply",)),
    Case("stamp-not-string", stamps({"w": "f32"}), ('__metadata__ entry "colibri.fmt": expected a string, found {',)),
    Case(
        "stamp-conflict",
        stamps('{"w": "int8-row"}', '{"w": "fp8-e4m3-b128"}'),
        ('1.safetensors: colibri.fmt: tensor "w" is stamped "fp8-e4m3-b128" here and "int8-row" in', "0.safetensors"),
    ),
    Case(
        "stamp-conflict-in-one",
        stamps('{"w": "int8-row", "w": "int4-row"}'),
        ('0.safetensors: colibri.fmt: tensor "w" is stamped "int4-row" here and "int8-row" in',),
    ),
    Case("stamp-4097", stamps(_MANY), ("more than 4096 stamped tensors", "at most 4096 are accepted")),
]

CASES = [*PREFIX, *JSON, *ENTRIES, *SETS, *STAMPS]
