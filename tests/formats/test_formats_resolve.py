"""From sizes, stamps, rules and an explicit group size to a format: every step, collision and refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picaflor.container.types import Matrix, TensorInfo
from picaflor.errors import AmbiguousFormat, BadContainer, UnknownFormat, UsageError
from picaflor.formats import REGISTRY
from picaflor.formats.resolve import Candidate, FormatRule, candidates, resolve, routed_stamp

INT8, INT4, INT2, GROUPED = "int8-row", "int4-row", "int2-row", "int4-grouped"
INT3, E8, FP8, MXFP4, RANS = "int3-g64", "e8-iq3-lattice", "fp8-e4m3-b128", "mxfp4", "int4-rans256-g0"
SIDECAR_FORMATS = (INT8, INT4, INT2, GROUPED, INT3, E8, FP8)
SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
NAME = "model.layers.3.mlp.up_proj.weight"


def tensor(nbytes: int, dtype: str = "U8", shape: tuple[int, ...] | None = None, suffix: str = "") -> TensorInfo:
    return TensorInfo(NAME + suffix, dtype, shape or (nbytes,), 2, 1000, nbytes)


def sizes(name: str, rows: int, cols: int, group_size: int = 0) -> tuple[int, int]:
    codes, scales = REGISTRY[name].planes
    return codes.nbytes(rows, cols, group_size), scales.nbytes(rows, cols, group_size)


def ask(shape: tuple[int, int], code_bytes: int, scale_bytes: int, **options: Any) -> tuple[Matrix, list[str]]:
    """Resolve raw U8 codes with F32 scales; the matrix and the warnings."""
    warnings: list[str] = []
    scale = tensor(scale_bytes, "F32", (scale_bytes // 4,), ".qs")
    matrix = resolve(NAME, shape, tensor(code_bytes), scale, warn=warnings.append, **options)
    return matrix, warnings


def silent(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


# --- one format, no doubt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "group_size", "code_bytes", "scale_bytes"),
    [
        (INT8, (2048, 6144), 0, 2048 * 6144, 4 * 2048),
        (INT4, (2048, 6144), 0, 2048 * 3072, 4 * 2048),
        (INT2, (2048, 6144), 0, 2048 * 1536, 4 * 2048),
        (GROUPED, (2048, 6144), 64, 2048 * 3072, 4 * 2048 * 96),
        (GROUPED, (2048, 6144), 128, 2048 * 3072, 4 * 2048 * 48),
        (INT3, (2048, 6144), 0, 2048 * 96 * 24, 4 * 2048 * 96),
        (E8, (2048, 6144), 0, 2048 * 24 * 98, 4),
        (FP8, (2048, 6144), 0, 2048 * 6144, 4 * 16 * 48),
        (INT4, (5, 33), 0, 5 * 17, 20),
        (GROUPED, (3, 37), 16, 3 * 19, 4 * 3 * 3),
        (INT3, (5, 67), 0, 5 * 48, 4 * 5 * 2),
        (FP8, (130, 140), 0, 130 * 140, 16),
    ],
)
def test_sizes_give_the_format(
    name: str, shape: tuple[int, int], group_size: int, code_bytes: int, scale_bytes: int
) -> None:
    matrix, warnings = ask(shape, code_bytes, scale_bytes)
    assert (matrix.name, matrix.format, matrix.rows, matrix.cols) == (NAME, name, *shape)
    assert matrix.group_size == group_size
    assert [(span.shard, span.offset, span.nbytes) for span in matrix.spans] == [
        (2, 1000, code_bytes),
        (2, 1000, scale_bytes),
    ]
    assert warnings == []
    for stamp in SIDECAR_FORMATS:
        if stamp == name:
            assert ask(shape, code_bytes, scale_bytes, stamp=stamp)[0] == matrix
        else:
            with pytest.raises(BadContainer, match=rf"{NAME}: stamped {stamp}, but read as {name}"):
                ask(shape, code_bytes, scale_bytes, stamp=stamp)


@pytest.mark.parametrize("size", SIZES)
def test_every_group_size_at_model_widths(size: int) -> None:
    for cols in (2048, 6144, 12288, 16384):
        matrix, warnings = ask((8, cols), *sizes(GROUPED, 8, cols, size))
        assert (matrix.format, matrix.group_size, warnings) == (GROUPED, size, [])
        matrix, warnings = ask((8, cols), *sizes(GROUPED, 8, cols, size), group_size=size)
        assert (matrix.format, matrix.group_size, warnings) == (GROUPED, size, [])


def test_512_columns_collide_for_no_pair_of_sizes() -> None:
    for size in (16, 32, 48, 64, 96, 128, 192, 256):
        matrix, _ = ask((8, 512), *sizes(GROUPED, 8, 512, size))
        assert matrix.group_size == size


@pytest.mark.parametrize("size", [64, 128, 256])
def test_one_group_per_row_is_int4_row(size: int) -> None:
    matrix, warnings = ask((4, size - 3), *sizes(GROUPED, 4, size - 3, size))
    assert (matrix.format, matrix.group_size, warnings) == (INT4, 0, [])
    matrix, warnings = ask((4, size), *sizes(GROUPED, 4, size, size), group_size=size)
    assert (matrix.format, warnings) == (INT4, [])


# --- group size ties --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cols", "true_size", "read_as"),
    [(128, 96, 64), (64, 48, 32), (200, 192, 128), (80, 64, 48), (160, 128, 96), (133, 64, 48), (261, 128, 96)],
)
def test_smallest_matching_size_wins_with_a_warning(cols: int, true_size: int, read_as: int) -> None:
    given_sizes = sizes(GROUPED, 3, cols, true_size)
    matrix, warnings = ask((3, cols), *given_sizes)
    assert (matrix.format, matrix.group_size) == (GROUPED, read_as)
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{NAME} [3, {cols}]: read as int4-grouped at group size {read_as}, but")
    assert f"int4-grouped at group size {true_size}" in warnings[0]
    matrix, warnings = ask((3, cols), *given_sizes, group_size=true_size)
    assert (matrix.group_size, warnings) == (true_size, [])
    matrix, warnings = ask((3, cols), *given_sizes, rule=FormatRule("*", GROUPED, true_size))
    assert (matrix.group_size, warnings) == (true_size, [])
    matrix, warnings = ask((3, cols), *given_sizes, stamp=GROUPED)
    assert (matrix.group_size, len(warnings)) == (read_as, 1)


def test_ties_end_above_576_columns() -> None:
    """With more than one group two listed sizes have equal counts only up to 576 columns."""

    def tied(cols: int) -> bool:
        counts = [-(-cols // size) for size in SIZES if size < cols]
        return len(set(counts)) < len(counts)

    assert max(cols for cols in range(17, 4096) if tied(cols)) == 576
    _, warnings = ask((1, 576), *sizes(GROUPED, 1, 576, 256))
    assert len(warnings) == 1


def test_group_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        BadContainer, match=re.escape(f"{NAME}.qs: 6144 bytes of scales for [16, 6144], but group size 128 was asked")
    ) as caught:
        ask((16, 6144), *sizes(GROUPED, 16, 6144, 64), group_size=128)
    assert "needs 3072" in str(caught.value)


@pytest.mark.parametrize("size", [0, 17, 63, 100, 512, -16])
def test_odd_and_unlisted_sizes_are_refused(size: int) -> None:
    with pytest.raises(UnknownFormat, match=rf"{NAME}: group size {size} was asked for; accepted: 16, 32, 48"):
        ask((16, 6144), *sizes(GROUPED, 16, 6144, 64), group_size=size)


@pytest.mark.parametrize("size", [100, 512, 24, 33])
def test_containers_of_unlisted_sizes_are_refused(size: int) -> None:
    scales = 4 * 16 * -(-6144 // size)
    with pytest.raises(BadContainer, match=rf"{NAME}.qs: {scales} bytes of scales .* expected 64 \(int4-row\)"):
        ask((16, 6144), 16 * 3072, scales)


# --- step 1: one scale of four bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "stamp", "expected"),
    [
        # 98 columns. One row: int8-row and fp8 have e8's sizes too.
        (1, None, AmbiguousFormat),
        (1, E8, E8),
        (1, FP8, FP8),
        (1, INT8, INT8),
        (1, INT4, AmbiguousFormat),
        # Up to 128 rows: fp8 with one block.
        (2, None, AmbiguousFormat),
        (2, E8, E8),
        (2, FP8, FP8),
        (2, INT8, AmbiguousFormat),
        (128, None, AmbiguousFormat),
        (128, E8, E8),
        (128, FP8, FP8),
        # Two and three blocks: nothing but e8.
        (129, None, E8),
        (129, FP8, BadContainer),
        (384, None, E8),
        # Four blocks: fp8 with UE8M0 scales has four bytes of them.
        (385, None, AmbiguousFormat),
        (385, E8, E8),
        (385, FP8, AmbiguousFormat),
        (512, None, AmbiguousFormat),
        (512, E8, E8),
        # Five blocks: e8 again.
        (513, None, E8),
    ],
)
def test_e8_against_one_byte_formats(rows: int, stamp: str | None, expected: Any) -> None:
    shape, pair = (rows, 98), (rows * 98, 4)
    assert sizes(E8, rows, 98) == pair
    if isinstance(expected, str):
        matrix, warnings = ask(shape, *pair, stamp=stamp)
        assert (matrix.format, warnings) == (expected, [])
    else:
        with pytest.raises(expected, match=NAME):
            ask(shape, *pair, stamp=stamp)


def test_the_refusal_names_all_that_fits() -> None:
    with pytest.raises(AmbiguousFormat) as caught:
        ask((1, 98), 98, 4)
    assert str(caught.value) == (
        f"{NAME} [1, 98] with 98 bytes of codes and 4 bytes of scales: fits e8-iq3-lattice and fp8-e4m3-b128 and "
        "int8-row; no stamp says which (accepted stamps: e8-iq3-lattice, fp8-e4m3-b128, int8-row)"
    )
    with pytest.raises(AmbiguousFormat, match=r"fits e8-iq3-lattice and fp8-e4m3-b128 with UE8M0 scales; the stamp"):
        ask((400, 98), 400 * 98, 4, stamp=FP8)


@pytest.mark.parametrize("cols", [195, 196, 391, 392, 587, 588, 783, 784])
def test_e8_against_int4_row(cols: int) -> None:
    assert sizes(E8, 1, cols) == sizes(INT4, 1, cols)
    pair = sizes(E8, 1, cols)
    with pytest.raises(AmbiguousFormat, match=r"fits e8-iq3-lattice and int4-row; no stamp says which"):
        ask((1, cols), *pair)
    with pytest.raises(AmbiguousFormat, match=r"the stamp int8-row is none of them"):
        ask((1, cols), *pair, stamp=INT8)
    for name in (E8, INT4):
        matrix, warnings = ask((1, cols), *pair, stamp=name)
        assert (matrix.format, warnings) == (name, [])
        matrix, warnings = ask((1, cols), *pair, rule=FormatRule(NAME, name))
        assert (matrix.format, warnings) == (name, [])


def test_int4_row_of_one_row_elsewhere_is_no_collision() -> None:
    for cols in (194, 197, 393, 979, 980):
        assert ask((1, cols), *sizes(INT4, 1, cols))[0].format == INT4


# --- step 2: codes that no format has -----------------------------------------------------------------------------


def test_no_layout() -> None:
    with pytest.raises(UnknownFormat) as caught:
        ask((4, 1000), 4 * 1000 + 1, 16)
    assert str(caught.value) == (
        f"{NAME}: no format stores [4, 1000] in 4001 bytes; expected one of: int8-row 4000, int4-row 2000, "
        "int2-row 1000, int3-g64 1536, e8-iq3-lattice 1568"
    )


def test_e8_codes_without_their_tag() -> None:
    with pytest.raises(BadContainer, match=rf"{NAME}.qs: 16 bytes of tag for \[4, 1000\] e8-iq3-lattice, expected 4"):
        ask((4, 1000), 1568, 16)


@pytest.mark.parametrize(
    ("cols", "name"),
    [(47, INT4), (48, INT4), (95, GROUPED), (96, GROUPED), (143, GROUPED), (144, GROUPED), (24, INT8)],
)
def test_int3_coincidences_are_read_as_row_formats_with_a_warning(cols: int, name: str) -> None:
    pair = sizes(INT3, 5, cols)
    matrix, warnings = ask((5, cols), *pair)
    assert matrix.format == name
    assert matrix.group_size == (48 if name == GROUPED else 0)
    assert len(warnings) == 1
    assert "but its sizes also fit" in warnings[0]
    assert INT3 in warnings[0]
    with pytest.raises(BadContainer, match=f"stamped int3-g64, but read as {name}"):
        ask((5, cols), *pair, stamp=INT3)
    matrix, warnings = ask((5, cols), *pair, rule=FormatRule("*", INT3))
    assert (matrix.format, matrix.group_size, warnings) == (INT3, 0, [])


def test_int3_coincides_nowhere_else() -> None:
    for cols in range(1, 1200):
        code_bytes = sizes(INT3, 5, cols)[0]
        expected = {47: INT4, 48: INT4, 95: INT4, 96: INT4, 143: INT4, 144: INT4, 24: INT8}.get(cols)
        others = [name for name in (INT8, INT4, INT2) if sizes(name, 5, cols)[0] == code_bytes]
        assert others == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("cols", "name", "also"), [(1, INT8, [INT4, INT2]), (2, INT4, [INT2])], ids=["one column", "two columns"]
)
def test_one_and_two_columns(cols: int, name: str, also: list[str]) -> None:
    matrix, warnings = ask((5, cols), *sizes(INT2, 5, cols))
    assert matrix.format == name
    assert len(warnings) == 1
    assert all(other in warnings[0] for other in also)


# --- step 4: one byte per weight ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 128), (2, 129), (2, 256), (3, 257), (3, 384), (6144, 16384)])
def test_int8_and_fp8_with_as_many_blocks_as_rows(shape: tuple[int, int]) -> None:
    pair = sizes(INT8, *shape)
    assert pair == sizes(FP8, *shape)
    matrix, warnings = ask(shape, *pair)
    assert (matrix.format, warnings) == (INT8, [])
    assert ask(shape, *pair, stamp=INT8)[0].format == INT8
    assert ask(shape, *pair, stamp=FP8)[0].format == FP8
    assert ask(shape, *pair, rule=FormatRule("*", FP8))[0].format == FP8
    with pytest.raises(AmbiguousFormat, match=r"fits int8-row and fp8-e4m3-b128; the stamp int4-row is none of them"):
        ask(shape, *pair, stamp=INT4)


@pytest.mark.parametrize("shape", [(1, 400), (2, 1024), (129, 33000)])
def test_int8_and_exponent_bytes(shape: tuple[int, int]) -> None:
    pair = sizes(INT8, *shape)
    assert pair[1] == -(-shape[0] // 128) * -(-shape[1] // 128)
    assert ask(shape, *pair, stamp=INT8)[0].format == INT8
    for stamp in (None, FP8, INT4):
        with pytest.raises(AmbiguousFormat, match=r"fits int8-row and fp8-e4m3-b128 with UE8M0 scales"):
            ask(shape, *pair, stamp=stamp)


@pytest.mark.parametrize("stamp", [None, FP8, INT8, E8])
def test_exponent_bytes_are_recognised_and_refused(stamp: str | None) -> None:
    shape = (256, 1024)
    for dtype in ("U8", "F8_E8M0", "F32"):
        scale = tensor(16, dtype, suffix=".qs")
        with pytest.raises(UnknownFormat, match=r"recognised as fp8-e4m3-b128 with UE8M0 scales .* not implemented"):
            resolve(NAME, shape, tensor(256 * 1024), scale, stamp=stamp, warn=silent)


def test_only_o_proj_collides_among_model_shapes() -> None:
    shapes = [(2048, 6144), (16384, 2048), (576, 6144), (28672, 512), (6144, 16384), (12288, 6144), (6144, 12288)]
    shapes += [(6144, 2048), (154880, 6144), (4096, 2048), (128, 6144), (32, 6144)]
    for shape in shapes:
        assert (sizes(INT8, *shape) == sizes(FP8, *shape)) == (shape == (6144, 16384))


def test_scales_of_no_format() -> None:
    with pytest.raises(
        BadContainer, match=rf"{NAME}.qs: 400 bytes of scales for \[256, 1024\] int8-row, expected 1024"
    ):
        ask((256, 1024), 256 * 1024, 400)
    with pytest.raises(BadContainer, match=r"8 bytes of scales for \[4, 100\] int2-row, expected 16"):
        ask((4, 100), 100, 8)
    with pytest.raises(BadContainer, match=r"16 bytes of scales for \[4, 200\] int3-g64, expected 64"):
        ask((4, 200), 4 * 96, 16)
    with pytest.raises(BadContainer, match=r"12 bytes of scales for \[4, 100\] int4-row, expected 16"):
        ask((4, 100), 200, 12)


# --- stamps -------------------------------------------------------------------------------------------------------


def test_unknown_stamp() -> None:
    with pytest.raises(UnknownFormat, match=rf'{NAME}: stamped "int5-row", which is no known format; known: f32'):
        ask((2048, 6144), *sizes(INT8, 2048, 6144), stamp="int5-row")
    with pytest.raises(BadContainer, match="stamped f32, but read as int8-row"):
        ask((2048, 6144), *sizes(INT8, 2048, 6144), stamp="f32")


def test_entropy_coded_tensors_are_refused_before_sizes() -> None:
    for pair in (sizes(INT4, 64, 512), (12345, 7)):
        with pytest.raises(UnknownFormat, match=rf"{NAME}: stamped int4-rans256-g0, an entropy-coded storage"):
            ask((64, 512), *pair, stamp=RANS)
    with pytest.raises(UnknownFormat, match="entropy-coded"):
        ask((64, 512), *sizes(INT4, 64, 512), stamp=RANS, rule=FormatRule("*", INT4))


def test_of_a_routed_stamp_only_the_storage_counts() -> None:
    assert routed_stamp(None) is None
    assert routed_stamp(INT8) is None
    assert routed_stamp("nonsense") is None
    assert routed_stamp(RANS) == RANS


# --- rules --------------------------------------------------------------------------------------------------------


def every_rule() -> list[Any]:
    return [
        pytest.param(name, size, id=f"{name}-{size}" if size else name)
        for name in (*SIDECAR_FORMATS, MXFP4)
        for size in REGISTRY[name].group_sizes or (0,)
    ]


@pytest.mark.parametrize(("name", "size"), every_rule())
@pytest.mark.parametrize("shape", [(1, 1), (1, 98), (3, 24), (5, 48), (4, 196), (2, 300), (129, 257)])
def test_a_rule_is_believed(name: str, size: int, shape: tuple[int, int]) -> None:
    code_bytes, scale_bytes = sizes(name, *shape, size)
    dtype = "U8" if name == MXFP4 else "F32"
    scale = tensor(scale_bytes, dtype, suffix=".qs")
    rule = FormatRule("model.*", name, size)
    matrix = resolve(NAME, shape, tensor(code_bytes), scale, rule=rule, warn=silent)
    assert (matrix.format, matrix.group_size) == (name, size)
    assert [span.nbytes for span in matrix.spans] == [code_bytes, scale_bytes]
    for codes, scales in ((code_bytes + 1, scale_bytes), (code_bytes, scale_bytes + 4)):
        with pytest.raises(BadContainer, match=rf"expected {code_bytes if codes != code_bytes else scale_bytes}$"):
            resolve(NAME, shape, tensor(codes), tensor(scales, dtype, suffix=".qs"), rule=rule, warn=silent)
    with pytest.raises(BadContainer, match=rf"{NAME}: has no scale tensor; {name}.* stores 2 tensors per matrix"):
        resolve(NAME, shape, tensor(code_bytes), None, rule=rule, warn=silent)


def test_a_rule_and_a_stamp_must_agree() -> None:
    shape = (64, 512)
    rule = FormatRule("*", GROUPED, 64)
    pair = sizes(GROUPED, *shape, 64)
    assert ask(shape, *pair, rule=rule, stamp=GROUPED)[0].group_size == 64
    with pytest.raises(BadContainer, match=rf'{NAME}: stamped int4-row, but the rule "\*" says int4-grouped'):
        ask(shape, *pair, rule=rule, stamp=INT4)
    # One group per row: readers without rules know it as int4-row, and stamp it so.
    assert ask((64, 40), *sizes(GROUPED, 64, 40, 64), rule=rule, stamp=INT4)[0].format == GROUPED
    with pytest.raises(BadContainer, match="stamped int8-row, but the rule"):
        ask((64, 40), *sizes(GROUPED, 64, 40, 64), rule=rule, stamp=INT8)


def test_a_rule_and_an_explicit_size_must_agree() -> None:
    shape = (64, 512)
    pair = sizes(GROUPED, *shape, 64)
    rule = FormatRule("*", GROUPED, 64)
    assert ask(shape, *pair, rule=rule, group_size=64)[0].group_size == 64
    with pytest.raises(UsageError, match=rf'{NAME}: group size 128 was asked for, the container\'s rule "\*" says 64'):
        ask(shape, *pair, rule=rule, group_size=128)
    assert ask(shape, *sizes(INT8, *shape), rule=FormatRule("*", INT8), group_size=128)[0].format == INT8


def test_mxfp4_comes_from_a_rule_only() -> None:
    shape = (64, 512)
    codes, exponents = sizes(MXFP4, *shape)
    for dtype in ("U8", "F8_E8M0"):
        scale = tensor(exponents, dtype, (64, 16), suffix=".qs")
        matrix = resolve(NAME, shape, tensor(codes), scale, rule=FormatRule("*", MXFP4), warn=silent)
        assert matrix.format == MXFP4
        with pytest.raises(BadContainer, match="int4"):
            resolve(NAME, shape, tensor(codes), scale, warn=silent)
    with pytest.raises(BadContainer, match=r"exponents of dtype F32; mxfp4 takes U8 or F8_E8M0"):
        resolve(NAME, shape, tensor(codes), tensor(exponents, "F32"), rule=FormatRule("*", MXFP4), warn=silent)


# --- float tensors and block-FP8 checkpoints ------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name", "item"), [("F32", "f32", 4), ("BF16", "bf16", 2), ("F16", "f16", 2)])
def test_float_tensors(dtype: str, name: str, item: int) -> None:
    weight = tensor(5 * 7 * item, dtype, (5, 7))
    matrix = resolve(NAME, (5, 7), weight, None, warn=silent)
    assert (matrix.format, matrix.group_size, [span.nbytes for span in matrix.spans]) == (name, 0, [5 * 7 * item])
    assert resolve(NAME, (5, 7), weight, None, rule=FormatRule("*", name), warn=silent) == matrix
    assert resolve(NAME, (5, 7), weight, None, stamp="int8-row", warn=silent) == matrix
    with pytest.raises(BadContainer, match=rf"{NAME}: {35 * item} bytes of values for \[5, 8\] {name}, expected"):
        resolve(NAME, (5, 8), weight, None, warn=silent)
    with pytest.raises(BadContainer, match=rf"{NAME}: shape \[5, 7\], expected \[7, 5\]"):
        resolve(NAME, (7, 5), weight, None, warn=silent)
    with pytest.raises(BadContainer, match=rf"{NAME}: shape \[35\], expected \[5, 7\]"):
        resolve(NAME, (5, 7), tensor(35 * item, dtype, (35,)), None, warn=silent)
    with pytest.raises(BadContainer, match=rf"{NAME}: values of dtype {dtype}; f.* takes"):
        resolve(NAME, (5, 7), weight, None, rule=FormatRule("*", "f16" if name == "f32" else "f32"), warn=silent)
    with pytest.raises(BadContainer, match=rf"{NAME}: has a scale tensor {NAME}.qs; {name} stores 1 tensors"):
        resolve(NAME, (5, 7), weight, tensor(20, "F32", suffix=".qs"), rule=FormatRule("*", name), warn=silent)


@pytest.mark.parametrize("dtype", ["U8", "I8", "F8_E4M3", "I64", "F8_E8M0"])
def test_packed_codes_need_scales(dtype: str) -> None:
    with pytest.raises(BadContainer, match=rf"{NAME}: dtype {dtype} without a scale tensor; only F32, BF16, F16"):
        resolve(NAME, (5, 8), tensor(40, dtype, (5, 8)), None, warn=silent)


def test_float_codes_with_scales_are_refused() -> None:
    with pytest.raises(BadContainer, match=rf"{NAME}: codes of dtype BF16; int4-row takes U8 or I8"):
        resolve(NAME, (4, 8), tensor(16, "BF16", (4, 2)), tensor(16, "F32", suffix=".qs"), warn=silent)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "U8", "I64"])
def test_scales_are_float32(dtype: str) -> None:
    with pytest.raises(BadContainer, match=rf"{NAME}.qs: scales of dtype {dtype}; int4-row takes F32"):
        resolve(NAME, (4, 8), tensor(16), tensor(16, dtype, suffix=".qs"), warn=silent)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E4M3FN", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(256, 1024), (130, 140), (1, 98), (2, 256)])
def test_block_fp8_checkpoints(dtype: str, shape: tuple[int, int]) -> None:
    """The header's dtype settles what bytes alone would not."""
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    weight = tensor(shape[0] * shape[1], dtype, shape)
    scale = tensor(4 * blocks[0] * blocks[1], "F32", blocks, "_scale_inv")
    matrix = resolve(NAME, shape, weight, scale, warn=silent)
    assert (matrix.format, matrix.group_size) == (FP8, 0)
    assert [span.nbytes for span in matrix.spans] == [weight.nbytes, scale.nbytes]
    with pytest.raises(BadContainer, match="stamped int8-row, but read as fp8-e4m3-b128"):
        resolve(NAME, shape, weight, scale, stamp=INT8, warn=silent)


def test_block_fp8_checkpoints_of_other_scales() -> None:
    shape = (256, 1024)
    weight = tensor(256 * 1024, "F8_E4M3", shape)
    with pytest.raises(BadContainer, match=r"_scale_inv: shape \[8, 2\], expected \[2, 8\]"):
        resolve(NAME, shape, weight, tensor(64, "F32", (8, 2), "_scale_inv"), warn=silent)
    with pytest.raises(UnknownFormat, match="UE8M0 scales"):
        resolve(NAME, shape, weight, tensor(16, "F8_E8M0", (2, 8), "_scale_inv"), warn=silent)
    with pytest.raises(BadContainer, match=r"_scale_inv: scales of dtype BF16; fp8-e4m3-b128 takes F32"):
        resolve(NAME, shape, weight, tensor(32, "BF16", (2, 8), "_scale_inv"), warn=silent)
    with pytest.raises(BadContainer, match=r"_scale_inv: 4 bytes of scales .* expected 64"):
        resolve(NAME, shape, weight, tensor(4, "F32", (), "_scale_inv"), warn=silent)
    wrong = tensor(256 * 1024, "F8_E4M3", (1024, 256))
    with pytest.raises(BadContainer, match=rf"{NAME}: shape \[1024, 256\], expected \[256, 1024\]"):
        resolve(NAME, shape, wrong, tensor(64, "F32", (2, 8), "_scale_inv"), warn=silent)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (-1, 5)])
def test_empty_shapes_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(BadContainer, match=rf"{NAME}: shape \[{shape[0]}, {shape[1]}\]; expected at least one row"):
        ask(shape, 10, 4)


# --- all small shapes -----------------------------------------------------------------------------------------------


def check_own_sizes(name: str, size: int, rows: int, cols: int) -> None:
    """Resolving a format's own sizes gives it back in silence, or is refused as ambiguous, or is warned of.

    The only silent misread allowed is the documented one: fp8 with as many blocks as rows, unstamped, is int8-row.
    """
    pair = sizes(name, rows, cols, size)
    truth = Candidate(INT4) if name == GROUPED and size >= cols else Candidate(name, size)
    fitting = candidates(rows, cols, *pair)
    assert truth in fitting
    try:
        matrix, warnings = ask((rows, cols), *pair)
    except AmbiguousFormat:
        exponent_bytes = pair[1] == -(-rows // 128) * -(-cols // 128) and pair[0] == rows * cols
        assert len(fitting) > 1 or exponent_bytes
        return
    except UnknownFormat as error:
        raise AssertionError(f"{name} {size} [{rows}, {cols}]: {error}") from error
    found = Candidate(matrix.format, matrix.group_size)
    assert found in fitting
    rivals = {other for other in fitting if other != found and {other.format, found.format} != {INT8, FP8}}
    assert bool(warnings) == bool(rivals)
    if found != truth:
        assert warnings or (found.format, truth.format) == (INT8, FP8)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 129, 385])
def test_every_small_shape(rows: int) -> None:
    for cols in range(1, 300):
        for name in SIDECAR_FORMATS:
            for size in REGISTRY[name].group_sizes or (0,):
                check_own_sizes(name, size, rows, cols)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(SIDECAR_FORMATS),
    size=st.sampled_from(SIZES),
    rows=st.integers(1, 3000),
    cols=st.integers(1, 40000),
)
def test_own_sizes_of_any_shape(name: str, size: int, rows: int, cols: int) -> None:
    check_own_sizes(name, size if name == GROUPED else 0, rows, cols)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 200),
    cols=st.integers(1, 700),
    code_bytes=st.integers(0, 150_000),
    scale_bytes=st.integers(0, 10_000),
    stamp=st.sampled_from([None, *SIDECAR_FORMATS, "f32", "bogus", RANS]),
)
def test_nothing_is_accepted_by_default(rows: int, cols: int, code_bytes: int, scale_bytes: int, stamp: Any) -> None:
    """Arbitrary sizes: what is accepted has exactly the sizes of its format and never contradicts the stamp."""
    try:
        matrix, _ = ask((rows, cols), code_bytes, scale_bytes, stamp=stamp)
    except (UnknownFormat, AmbiguousFormat, BadContainer) as error:
        message = str(error)
    else:
        assert (code_bytes, scale_bytes) == sizes(matrix.format, rows, cols, matrix.group_size)
        assert stamp in (None, matrix.format)
        return
    assert NAME in message
    assert "\n" not in message


def test_one_size_off_is_always_refused() -> None:
    off: list[Callable[[int, int], tuple[int, int]]] = [
        lambda codes, scales: (codes + 1, scales),
        lambda codes, scales: (codes - 1, scales),
        lambda codes, scales: (codes, scales + 4),
        lambda codes, scales: (codes, scales - 4),
        lambda codes, scales: (codes, scales + 1),
    ]
    for name in SIDECAR_FORMATS:
        size = 64 if name == GROUPED else 0
        pair = sizes(name, 200, 1000, size)
        for change in off:
            with pytest.raises((UnknownFormat, BadContainer)):
                ask((200, 1000), *change(*pair))
