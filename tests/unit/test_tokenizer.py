"""Tokenizer: ids of added tokens anywhere, streams of whole characters, stop tokens, refusals by name.

Must not know models. The vocabulary is made here: 256 bytes, a few merges, control and content tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from picaflor.errors import BadTemplate, BadTokenizer, ContextExceeded, UnsupportedConfig
from picaflor.runtime.tokenizer import StopSet, Tokenizer, byte_alphabet, eos_ids, role_markers, stop_set

CONTROL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|im_end|>", "<mark é>"]
CONTENT = ["<think>", "</think>"]


def make(folder: Path) -> Path:
    """Write a tokenizer.json; returns the folder."""
    letters = sorted(byte_alphabet())
    pieces = ["th", "the", "Ġthe", "Ã©", "ï¿", "ï¿½"]
    vocabulary = {piece: number for number, piece in enumerate([*letters, *pieces])}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("ï", "¿"), ("ï¿", "½")]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Split(tokenizers.Regex(r"'s| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in CONTENT])
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """The small tokenizer."""
    return Tokenizer.open(make(tmp_path), vocabulary=280)


def test_the_alphabet_is_the_one_of_the_library() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert byte_alphabet()["Ġ"] == 0x20
    assert byte_alphabet()["Ċ"] == 0x0A
    assert byte_alphabet()["Ń"] == 0xAD


@pytest.mark.parametrize("added", CONTROL + CONTENT)
@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(["", "Fine.", "the ", "é\n", "("], ["", "the", ")", " x"]))
)
def test_added_tokens_are_found_in_any_position(tokenizer: Tokenizer, added: str, before: str, after: str) -> None:
    number = tokenizer.token_id(added)
    assert number is not None
    ids = tokenizer.encode(before + added + after)
    assert ids == [*tokenizer.encode(before), number, *tokenizer.encode(after)]


def test_nothing_is_put_in_front(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode("the the") == [tokenizer.token_id("the"), tokenizer.token_id("Ġthe")]


def test_control_tokens_leave_the_text_and_content_stays(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|user|>b<think>c</think><mark é>")
    assert tokenizer.decode(ids) == "ab<think>c</think>"
    assert tokenizer.decode(ids, keep_special=True) == "a<|user|>b<think>c</think><mark é>"
    assert {tokenizer.added[number] for number in tokenizer.special} == set(CONTROL)


@pytest.mark.parametrize(
    "text", ["naïve €5 🦜🇨🇭", "日本語のテキスト", "\ufffd real", "a\u0301", "the\r\n\tthe", "\x00\x7f\u0085"]
)
def test_streams_never_show_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) > len(text) // 2
    stream = tokenizer.stream()
    pieces = [stream.push(number) for number in ids]
    assert "".join(pieces) == text
    assert stream.finish() == ""
    assert tokenizer.decode(ids) == text
    seen = ""
    for piece in pieces:
        seen += piece
        assert text.startswith(seen)


def test_bytes_that_are_no_text_become_one_mark_each_and_only_when_certain(tokenizer: Tokenizer) -> None:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def ids(data: bytes) -> list[int]:
        return [tokenizer.token_id(letters[byte]) or 0 for byte in data]

    stream = tokenizer.stream()
    assert [stream.push(number) for number in ids(b"a\xe2\x82")] == ["a", "", ""]
    assert stream.push(ids(b"\xac")[0]) == "€"
    assert stream.push(ids(b"\xf0")[0]) == ""
    assert stream.push(ids(b"z")[0]) == "\ufffdz"
    assert stream.push(ids(b"\xe2")[0]) == ""
    assert stream.finish() == "\ufffd"
    random.seed(3)
    for _ in range(200):
        data = bytes(random.choice(b"a\xc3\xa9\xe2\x82\xac\xf0\x9f\xff") for _ in range(12))
        assert tokenizer.decode(ids(data)) == data.decode("utf-8", "replace")


def test_text_equals_the_librarys_own_decoding(tokenizer: Tokenizer, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Fine.<|im_end|>the é\n<think> ok"
    assert tokenizer.encode(text) == inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == inner.decode(tokenizer.encode(text), skip_special_tokens=True)


def test_ids_without_a_token_are_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([5000, *tokenizer.encode("x")]) == "x"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "found no tokenizer file at all"),
        (["qwen.tiktoken"], "found qwen.tiktoken (a tiktoken vocabulary)"),
        (["merges.txt", "vocab.json"], "found merges.txt, vocab.json"),
        (["tokenizer.model"], "found tokenizer.model"),
    ],
)
def test_a_missing_file_says_what_is_there_and_what_makes_it(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(BadTokenizer, match=re.escape(message)) as caught:
        Tokenizer.open(tmp_path, family="glm_moe_dsa")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}: tokenizer.json is missing, ")
    way = "to make it: python -c" if files else "copy tokenizer.json from where the model's weights came from"
    assert f"model family glm_moe_dsa; accepted: a byte-level tokenizer.json; {way}" in text
    assert ("AutoTokenizer" in text) == bool(files)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[" * 100000, "not valid JSON"),
        (b"\xff\xfe", "cannot be read as UTF-8 text"),
        (b"[]", "decoder is null; accepted: ByteLevel"),
        (b'{"decoder": {"type": "WordPiece"}}', 'decoder is "WordPiece"; accepted: ByteLevel'),
        (b'{"decoder": {"type": "ByteLevel"}}', "model is null; accepted: BPE"),
        (b'{"decoder": {"type": "ByteLevel"}, "model": {"type": "Unigram"}}', 'model is "Unigram"; accepted: BPE'),
        (b'{"decoder": {"type": "ByteLevel"}, "model": {"type": "WordLevel", "vocab": {}}}', 'model is "WordLevel"'),
        (b'{"decoder": {"type": "ByteLevel"}, "model": {"type": "BPE"}}', "not usable: "),
        (b'{"decoder": {"type": "ByteLevel"}, "model": {"merges": []}}', "not usable: "),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadTokenizer, match=re.escape(message)) as caught:
        Tokenizer.open(tmp_path)
    assert "tokenizer.json: " in str(caught.value)
    assert "\n" not in str(caught.value)


def changed(folder: Path, change: Mapping[str, Any]) -> Path:
    """A folder with the small tokenizer, its file's values replaced; those of "model" one by one."""
    path = make(folder) / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"].update(change.get("model", {}))
    values.update({name: value for name, value in change.items() if name != "model"})
    path.write_text(json.dumps(values))
    return folder


CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PAD = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "[PAD]",
}
IN_FRONT = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]}},
}


@pytest.mark.parametrize("change", [{"truncation": CUT}, {"padding": PAD}, {"post_processor": IN_FRONT}])
def test_what_a_file_says_for_training_changes_no_prompt(tmp_path: Path, change: Mapping[str, Any]) -> None:
    text = "the cat sat on the mat"
    ids = Tokenizer.open(make(tmp_path)).encode(text)
    inner = tokenizers.Tokenizer.from_file(str(changed(tmp_path, change) / "tokenizer.json"))
    assert inner.encode(text).ids != ids
    assert Tokenizer.open(tmp_path).encode(text) == ids


@pytest.mark.parametrize("dropout", [0.9, 1, 1e-9, True])
def test_an_encoding_by_chance_is_refused(tmp_path: Path, dropout: object) -> None:
    with pytest.raises(BadTokenizer, match=rf"model\.dropout is {json.dumps(dropout)}, .*accepted: null or 0"):
        Tokenizer.open(changed(tmp_path, {"model": {"dropout": dropout}}))


@pytest.mark.parametrize("dropout", [None, 0, 0.0])
def test_no_dropout_is_accepted(tmp_path: Path, dropout: object) -> None:
    Tokenizer.open(changed(tmp_path, {"model": {"dropout": dropout}}))


def test_a_library_that_gives_up_is_a_bad_tokenizer(tmp_path: Path) -> None:
    endless = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 32}
    tokenizer = Tokenizer.open(changed(tmp_path, {"normalizer": endless}))
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json: not usable: ") as caught:
        tokenizer.encode("the cat")
    assert "\n" not in str(caught.value)
    assert tokenizer.decode([-1, 1 << 40]) == ""


@pytest.mark.parametrize(("sizes", "growth"), [((33,), 33), ((8, 8), 64), ((2,) * 40, 64)])
def test_replacements_that_blow_a_text_up_are_refused(tmp_path: Path, sizes: tuple[int, ...], growth: int) -> None:
    parts = [{"type": "Replace", "pattern": {"String": "x"}, "content": "x" * size} for size in sizes]
    with pytest.raises(BadTokenizer, match=f"a text up to {growth} times as long; accepted: 32 times"):
        Tokenizer.open(changed(tmp_path, {"normalizer": {"type": "Sequence", "normalizers": parts}}))
    Tokenizer.open(changed(tmp_path, {"normalizer": {"type": "Sequence", "normalizers": parts[:1] * (growth == 64)}}))


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tokenizer: Tokenizer) -> None:
    tokenizer.most_tokens = 10
    assert tokenizer.encode("the " * 160)
    with pytest.raises(ContextExceeded, match="641 characters; a context of 10 tokens takes at most 640"):
        tokenizer.encode("x" * 641)


def unreadable(path: Path, kind: str) -> str:
    """Put something that is no file at a path; returns what an error says about it."""
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(path.parent / "nowhere")
        return f"is a link to {path.parent / 'nowhere'}, which does not exist"
    if kind == "loop":
        path.symlink_to(path)
        return "cannot be read: Too many levels of symbolic links"
    if kind == "folder":
        path.mkdir()
        return "is a folder; a regular file was expected"
    os.mkfifo(path)
    return "is a pipe; a regular file was expected"


@pytest.mark.parametrize("kind", ["link", "loop", "folder", "pipe"])
def test_what_cannot_be_read_is_not_called_missing(tmp_path: Path, kind: str) -> None:
    cause = unreadable(tmp_path / "tokenizer.json", kind)
    with pytest.raises(BadTokenizer, match=re.escape(f"{tmp_path / 'tokenizer.json'}: {cause}")):
        Tokenizer.open(tmp_path)


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    largest = 256 + 6 + len(CONTROL) + len(CONTENT) - 1
    with pytest.raises(BadTokenizer, match=f"the largest token id is {largest}; the model has {largest} ids"):
        Tokenizer.open(tmp_path, vocabulary=largest)
    Tokenizer.open(tmp_path, vocabulary=largest + 1)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [9, 7]}, {"eos_token_id": 3}, (3, 7, 9)),
        ({"eos_token_id": None}, {"eos_token_id": [3, 3]}, (3,)),
        ({}, {}, ()),
    ],
)
def test_end_tokens_are_the_union(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, ids: tuple[int, ...]
) -> None:
    assert eos_ids(config, generation) == ids


@pytest.mark.parametrize("value", ["2", [1, "2"], True, -1, 100, 1.0])
def test_end_tokens_that_are_no_ids(value: object) -> None:
    accepted = re.escape(f"generation_config.json: eos_token_id is {json.dumps(value)}; accepted: a token id below 100")
    with pytest.raises(UnsupportedConfig, match=accepted):
        eos_ids({"eos_token_id": 1}, {"eos_token_id": value}, vocabulary=100)


def test_role_markers_of_a_template_that_opens_turns(tokenizer: Tokenizer) -> None:
    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        marks = {"user": "<|user|>\n", "assistant": "<|assistant|><think></think><mark é>\n", "tool": "<|observation|>"}
        if messages[0]["role"] == "system":
            raise BadTemplate("no system turn here")
        return "<mark é>" + "".join(marks[turn["role"]] + turn["content"] for turn in messages)

    names = {tokenizer.added[number] for number in role_markers(tokenizer, render)}
    assert names == {"<|user|>", "<|assistant|>", "<|observation|>"}
    found = stop_set(tokenizer, {"eos_token_id": 4}, None, render=render, vocabulary=280)
    assert found.ids == {4} | {tokenizer.token_id(name) for name in names}
    assert tokenizer.token_id("<think>") not in found.ids
    assert tokenizer.token_id("<mark é>") not in found.ids


def test_role_markers_of_a_template_that_closes_turns(tokenizer: Tokenizer) -> None:
    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"<|user|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages)

    names = {tokenizer.added[number] for number in role_markers(tokenizer, render)}
    assert names == {"<|user|>", "<|im_end|>"}


def test_without_a_template_only_end_tokens_stop(tokenizer: Tokenizer) -> None:
    assert stop_set(tokenizer, {"eos_token_id": 4}, None) == StopSet((4,), ())


def in_pieces(tokenizer: Tokenizer, text: str, letters: int, chunk: int = 37) -> tuple[list[int], list[int]]:
    """(all tokens, tokens per piece) of a text that comes in chunks."""
    chunks = [text[start : start + chunk] for start in range(0, len(text), chunk)]
    pieces = list(tokenizer.encode_pieces(chunks, letters=letters))
    assert sum(nbytes for _, nbytes in pieces) == len(text.encode())
    return [number for ids, _ in pieces for number in ids], [len(ids) for ids, _ in pieces]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_have_the_tokens_of_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    words = ["the", "th", "é", "'s", "x1", "🦜", "\ufffd", "(", *CONTROL, *CONTENT]
    gaps = [" ", " ", " ", "\n", "", "  ", "\n\n", " \n ", "\t"]
    text = "".join(chance.choice(words) + chance.choice(gaps) for _ in range(400))
    ids, sizes = in_pieces(tokenizer, text, 64)
    assert ids == tokenizer.encode(text)
    assert len(sizes) > 5


@pytest.mark.parametrize("text", ["", "a", "the " * 500, "the" * 500, " " * 2000, "\n" * 2000, "the\n" * 500])
@pytest.mark.parametrize("letters", [8, 64, 5000])
def test_pieces_of_monotonous_texts(tokenizer: Tokenizer, text: str, letters: int) -> None:
    assert in_pieces(tokenizer, text, letters)[0] == tokenizer.encode(text)


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Prepend", "prepend": "th"}},
    ],
)
def test_pieces_where_a_text_begins_or_splits_in_another_way(tmp_path: Path, change: Mapping[str, Any]) -> None:
    tokenizer = Tokenizer.open(changed(tmp_path, change))
    text = "the cat e\u0301 sat\non the mat. " * 40
    ids, sizes = in_pieces(tokenizer, text, 100)
    assert ids == tokenizer.encode(text)
    if change == {"pre_tokenizer": None}:
        assert len(sizes) == 1  # nothing says that a token cannot reach over a space


@pytest.mark.parametrize("domain", ["prose", "code", "docs"])
@pytest.mark.parametrize("letters", [500, 4096, 1 << 15])
def test_pieces_of_texts_that_were_held_out(test_data: Path, domain: str, letters: int) -> None:
    tokenizer = Tokenizer.open(test_data / "models" / "tiny-glm-dsa")
    text = (test_data / "models" / "heldout" / f"{domain}.txt").read_bytes().decode()
    ids, sizes = in_pieces(tokenizer, text, letters, chunk=1 << 12)
    assert ids == tokenizer.encode(text)
    assert max(sizes) <= letters
    assert len(sizes) >= len(text) // letters
