"""From names, shapes and byte counts to a format: the only place where sizes become a meaning.

Knows formats and tensor descriptions; must not know families, files or devices. Order: an entropy-coded stamp is
refused, a rule is believed and its sizes checked, a float tensor is what its dtype says, and only then is the format
guessed from sizes with the stamp as witness. docs/formats.md, "How a format is recognised". There is no default: what
fits nothing, or fits two things that nobody tells apart, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from picaflor.container.strict_json import show
from picaflor.container.types import Matrix, Span, TensorInfo
from picaflor.errors import AmbiguousFormat, BadContainer, UnknownFormat, UsageError
from picaflor.formats import (
    REGISTRY,
    e8_iq3,
    fp8_b128,
    get,
    int2_row,
    int3_g64,
    int4_grouped,
    int4_row,
    int8_row,
    mxfp4,
)
from picaflor.formats.numeric import ceil_div
from picaflor.formats.rules import (
    RANS_STAMP,
    FormatRule,
    FormatRules,
    merge_rules,
    parse_stamps,
    routed_stamp,
)

__all__ = [
    "Candidate",
    "FormatRule",
    "FormatRules",
    "candidates",
    "merge_rules",
    "parse_stamps",
    "resolve",
    "routed_stamp",
]

INT8 = int8_row.NAME
INT4 = int4_row.NAME
INT2 = int2_row.NAME
INT3 = int3_g64.NAME
GROUPED = int4_grouped.NAME
E8 = e8_iq3.NAME
FP8 = fp8_b128.NAME
MXFP4 = mxfp4.NAME

FLOAT_DTYPES = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
E4M3_DTYPES = ("F8_E4M3", "F8_E4M3FN", "float8_e4m3fn")
UE8M0_DTYPES = ("F8_E8M0", "F8_E8M0FNU")
RAW_DTYPES = ("U8", "I8")
_UE8M0 = "fp8-e4m3-b128 with UE8M0 scales"


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A format, and a group size where the format leaves one to choose, whose sizes fit."""

    format: str
    group_size: int = 0

    def __str__(self) -> str:
        return f"{self.format} at group size {self.group_size}" if self.group_size else self.format


@dataclass(frozen=True, slots=True)
class _Case:
    """One tensor pair on its way to a format; sizes in bytes."""

    name: str
    rows: int
    cols: int
    codes: TensorInfo
    scales: TensorInfo
    stamp: str | None
    group_size: int | None
    warn: Callable[[str], None]

    @property
    def code_bytes(self) -> int:
        return self.codes.nbytes

    @property
    def scale_bytes(self) -> int:
        return self.scales.nbytes

    @property
    def fp8_blocks(self) -> int:
        return ceil_div(self.rows, fp8_b128.BLOCK) * ceil_div(self.cols, fp8_b128.BLOCK)

    def __str__(self) -> str:
        return (
            f"{self.name} [{self.rows}, {self.cols}] with {self.code_bytes} bytes of codes and {self.scale_bytes} "
            "bytes of scales"
        )


@lru_cache(maxsize=4096)
def candidates(rows: int, cols: int, code_bytes: int, scale_bytes: int) -> tuple[Candidate, ...]:
    """Every format that `.qs` containers hold and whose exact sizes are these; none is preferred.

    int4-grouped counts only where a row has more than one group: with one it is int4-row.
    """
    found = []
    for name in (INT8, INT4, INT2, GROUPED, INT3, E8, FP8):
        for size in REGISTRY[name].group_sizes or (0,):
            if size and size >= cols:
                continue
            codes, scales = REGISTRY[name].planes
            if codes.nbytes(rows, cols, size) == code_bytes and scales.nbytes(rows, cols, size) == scale_bytes:
                found.append(Candidate(name, size))
    return tuple(found)


def resolve(
    name: str,
    shape: tuple[int, int],
    weight: TensorInfo,
    scale: TensorInfo | None,
    *,
    stamp: str | None = None,
    rule: FormatRule | None = None,
    group_size: int | None = None,
    warn: Callable[[str], None],
) -> Matrix:
    """The matrix `[rows, cols]` of a weight tensor and its scale tensor (`.qs`, or a checkpoint's `weight_scale_inv`).

    `stamp` is the tensor's `colibri.fmt` name; routed experts pass `routed_stamp` of it. `rule` is what
    `FormatRules.match` gave. `group_size` replaces the guess of a group size, never a rule's. `warn` gets one line
    when a guess had more than one candidate. Raises UnknownFormat, AmbiguousFormat or BadContainer naming the tensor,
    UsageError for a group size that contradicts a rule.
    """
    rows, cols = shape
    if rows < 1 or cols < 1:
        raise BadContainer(f"{name}: shape [{rows}, {cols}]; expected at least one row and one column")
    if stamp == RANS_STAMP:
        raise UnknownFormat(
            f"{name}: stamped {RANS_STAMP}, an entropy-coded storage that cannot be read; store it as int4-row first"
        )
    if group_size is not None and group_size not in int4_grouped.GROUP_SIZES:
        raise UnknownFormat(
            f"{name}: group size {group_size} was asked for; accepted: {', '.join(map(str, int4_grouped.GROUP_SIZES))}"
        )
    if scale is not None and stamp is not None and stamp not in REGISTRY:
        raise UnknownFormat(f"{name}: stamped {show(stamp)}, which is no known format; known: {', '.join(REGISTRY)}")
    if rule is not None:
        return _by_rule(name, shape, weight, scale, stamp=stamp, rule=rule, group_size=group_size)
    if scale is None:
        return _without_scales(name, shape, weight)
    case = _Case(name, rows, cols, weight, scale, stamp, group_size, warn)
    found = _by_sizes(case)
    if stamp is not None and stamp != found.format:
        raise BadContainer(f"{name}: stamped {stamp}, but read as {found.format} by its sizes")
    return _matrix(name, shape, found, (weight, scale))


def _matrix(name: str, shape: tuple[int, int], found: Candidate, parts: tuple[TensorInfo, ...]) -> Matrix:
    """The matrix, after its byte counts and dtypes were compared with what the format produces."""
    rows, cols = shape
    known = get(found.format)
    if len(parts) != len(known.planes):
        extra = "has no scale tensor" if len(parts) < len(known.planes) else f"has a scale tensor {parts[-1].name}"
        raise BadContainer(f"{name}: {extra}; {found} stores {len(known.planes)} tensors per matrix")
    for number, (plane, part) in enumerate(zip(known.planes, parts, strict=True)):
        accepted = _dtypes(found.format, number)
        if part.dtype not in accepted:
            raise BadContainer(
                f"{part.name}: {plane.name} of dtype {part.dtype}; {found.format} takes {' or '.join(accepted)}"
            )
        expected = plane.nbytes(rows, cols, found.group_size)
        if part.nbytes != expected:
            raise BadContainer(
                f"{part.name}: {part.nbytes} bytes of {plane.name} for [{rows}, {cols}] {found}, expected {expected}"
            )
        extents = plane.shape(rows, cols, found.group_size)
        flat_scales = number == 1 and len(part.shape) == 1
        if part.dtype not in RAW_DTYPES and not flat_scales and part.shape != extents:
            raise BadContainer(f"{part.name}: shape {list(part.shape)}, expected {list(extents)}")
    spans = tuple(Span(part.shard, part.offset, part.nbytes) for part in parts)
    return Matrix(name, found.format, rows, cols, found.group_size, spans)


def _dtypes(format_name: str, plane: int) -> tuple[str, ...]:
    """The header dtypes in which a plane of a format is stored."""
    if format_name in FLOAT_DTYPES.values():
        return tuple(dtype for dtype, known in FLOAT_DTYPES.items() if known == format_name)
    if plane == 1:
        return ("U8", *UE8M0_DTYPES) if format_name == MXFP4 else ("F32",)
    return (*RAW_DTYPES, *E4M3_DTYPES) if format_name == FP8 else RAW_DTYPES


def _by_rule(
    name: str,
    shape: tuple[int, int],
    weight: TensorInfo,
    scale: TensorInfo | None,
    *,
    stamp: str | None,
    rule: FormatRule,
    group_size: int | None,
) -> Matrix:
    """The format that the container's own rule names; nothing is guessed."""
    if rule.group_size and group_size is not None and group_size != rule.group_size:
        raise UsageError(
            f"{name}: group size {group_size} was asked for, the container's rule {show(rule.pattern)} says "
            f"{rule.group_size}"
        )
    found = Candidate(rule.format, rule.group_size)
    if scale is not None and stamp is not None and stamp != rule.format:
        one_group = rule.format == GROUPED and rule.group_size >= shape[1]
        if not (one_group and stamp == INT4):
            raise BadContainer(f"{name}: stamped {stamp}, but the rule {show(rule.pattern)} says {rule.format}")
    return _matrix(name, shape, found, (weight,) if scale is None else (weight, scale))


def _without_scales(name: str, shape: tuple[int, int], weight: TensorInfo) -> Matrix:
    """A float tensor: its dtype is its format. A stamp on it means nothing."""
    if weight.dtype not in FLOAT_DTYPES:
        raise BadContainer(
            f"{name}: dtype {weight.dtype} without a scale tensor; only {', '.join(FLOAT_DTYPES)} stand alone"
        )
    return _matrix(name, shape, Candidate(FLOAT_DTYPES[weight.dtype]), (weight,))


def _by_sizes(case: _Case) -> Candidate:
    """The guess from byte counts. Every return is checked once more by `_matrix`."""
    if case.codes.dtype in E4M3_DTYPES:
        return _e4m3(case)
    if case.scale_bytes == 4 and case.code_bytes == REGISTRY[E8].planes[0].nbytes(case.rows, case.cols, 0):
        return _one_scale(case)
    sizes = {known: REGISTRY[known].planes[0].nbytes(case.rows, case.cols, 0) for known in (INT8, INT4, INT2, INT3, E8)}
    name = next((known for known, nbytes in sizes.items() if nbytes == case.code_bytes), None)
    if name is None:
        expected = ", ".join(f"{known} {nbytes}" for known, nbytes in sizes.items())
        raise UnknownFormat(
            f"{case.name}: no format stores [{case.rows}, {case.cols}] in {case.code_bytes} bytes; expected one of: "
            f"{expected}"
        )
    found = Candidate(name)
    if name == INT8:
        found = _one_byte(case)
    elif name == INT4:
        found = _grouping(case)
    _warn_of_others(case, found)
    return found


def _warn_of_others(case: _Case, found: Candidate) -> None:
    """One line when the documented guess was a choice. Not for int8-row against fp8, where one kind of the two is
    stamped by its writers; not where the user chose."""
    if case.group_size is not None and found.group_size:
        return
    others = [
        str(other)
        for other in candidates(case.rows, case.cols, case.code_bytes, case.scale_bytes)
        if other != found and {other.format, found.format} != {INT8, FP8}
        if case.stamp is None or other.format == case.stamp
    ]
    if others:
        case.warn(
            f"{case.name} [{case.rows}, {case.cols}]: read as {found}, but its sizes also fit {', '.join(others)}; "
            "format rules in the container (or an explicit group size) say which"
        )


def _e4m3(case: _Case) -> Candidate:
    """Codes whose header says e4m3: a block-FP8 checkpoint. One float32 per block or nothing."""
    if case.scales.dtype in UE8M0_DTYPES or case.scale_bytes == case.fp8_blocks:
        raise _ue8m0(case)
    return Candidate(FP8)


def _ue8m0(case: _Case) -> UnknownFormat:
    """The refusal of block scales that are exponent bytes."""
    return UnknownFormat(
        f"{case}: recognised as {_UE8M0} (one byte per block), which is not implemented; float32 scales are accepted"
    )


def _one_scale(case: _Case) -> Candidate:
    """Sizes of e8 with its tag of four bytes; other formats that have the same sizes need a stamp."""
    rivals = []
    one_byte = case.code_bytes == case.rows * case.cols
    if one_byte and case.fp8_blocks == 1:
        rivals.append(FP8)
    for name in (INT8, INT4):
        codes, scales = REGISTRY[name].planes
        if codes.nbytes(case.rows, case.cols, 0) == case.code_bytes and scales.nbytes(case.rows, case.cols, 0) == 4:
            rivals.append(name)
    accepted = [E8, *rivals]
    if one_byte and case.fp8_blocks == 4:
        rivals.append(_UE8M0)
    if not rivals:
        return Candidate(E8)
    if case.stamp in accepted:
        return Candidate(case.stamp)
    raise AmbiguousFormat(f"{case}: fits {E8} and {' and '.join(rivals)}; {_stamp_wanted(case, accepted)}")


def _stamp_wanted(case: _Case, accepted: list[str]) -> str:
    """End of the message of a collision."""
    told = "no stamp says which" if case.stamp is None else f"the stamp {case.stamp} is none of them"
    return f"{told} (accepted stamps: {', '.join(accepted)})"


def _one_byte(case: _Case) -> Candidate:
    """One byte per weight: int8-row or fp8, told apart by the number of scales and then by the stamp."""
    row = case.scale_bytes == 4 * case.rows
    block = case.scale_bytes == 4 * case.fp8_blocks
    exponents = case.scale_bytes == case.fp8_blocks
    if row and block:
        if case.stamp not in (None, INT8, FP8):
            raise AmbiguousFormat(f"{case}: fits {INT8} and {FP8}; {_stamp_wanted(case, [INT8, FP8])}")
        return Candidate(FP8 if case.stamp == FP8 else INT8)
    if exponents:
        if row and case.stamp == INT8:
            return Candidate(INT8)
        if row:
            raise AmbiguousFormat(f"{case}: fits {INT8} and {_UE8M0} (not implemented); {_stamp_wanted(case, [INT8])}")
        raise _ue8m0(case)
    if block:
        return Candidate(FP8)
    return Candidate(INT8)


def _grouping(case: _Case) -> Candidate:
    """int4-row, or int4-grouped with the group size asked for, else the smallest that fits."""
    if case.scale_bytes <= 4 * case.rows:
        return Candidate(INT4)
    fitting = []
    for size in int4_grouped.GROUP_SIZES:
        if size > case.cols:
            break
        if case.scale_bytes == 4 * case.rows * ceil_div(case.cols, size):
            fitting.append(size)
    if case.group_size is not None:
        if case.group_size not in fitting:
            expected = 4 * case.rows * ceil_div(case.cols, case.group_size)
            raise BadContainer(
                f"{case.scales.name}: {case.scale_bytes} bytes of scales for [{case.rows}, {case.cols}], but group "
                f"size {case.group_size} was asked for and needs {expected}"
            )
        return Candidate(GROUPED, case.group_size)
    if not fitting:
        raise BadContainer(
            f"{case.scales.name}: {case.scale_bytes} bytes of scales for [{case.rows}, {case.cols}] with four bits per "
            f"weight; expected {4 * case.rows} ({INT4}) or those of group size "
            f"{', '.join(map(str, int4_grouped.GROUP_SIZES))}"
        )
    return Candidate(GROUPED, fitting[0])
