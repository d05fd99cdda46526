"""Text to tokens and back, and the tokens that end an answer.

Knows tokenizer.json through the `tokenizers` library; must not know models, templates' syntax or devices. Only
byte-level vocabularies are read: bytes of a token never depend on its neighbours, so a stream gives the same text as
the whole.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from picaflor.errors import BadTemplate, BadTokenizer, ContextExceeded, UnsupportedConfig
from picaflor.runtime import sidefile

MAX_TOKENIZER_BYTES = 1 << 30
FILE = "tokenizer.json"
MOST_LETTERS = 64
"""Characters per token of the context beyond which a prompt is refused before it is looked at."""
MOST_GROWTH = 32
"""How many times as long the replacements of a tokenizer may make a text."""
PIECE_LETTERS = 1 << 15
"""Characters that are encoded at once where a text of any length is read."""
_CUT_TRIES = 16
_CUT_VIEW = 128
_T = TypeVar("_T")
_OTHER_FILES = ("*.tiktoken", "tiktoken.model", "tokenizer.model", "vocab.json", "merges.txt", "tokenization_*.py")


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: itself where printable, else from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """A byte-level tokenizer. `special`: ids of added tokens that are control tokens, not content.

    `most_tokens`: the context that texts are encoded for, None where any length is wanted. What a file says about
    cutting and padding is for training and is switched off.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, where: str) -> None:
        self.where = where
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self.added: dict[int, str] = {number: token.content for number, token in added.items()}
        self.special = frozenset(number for number, token in added.items() if token.special)
        self.most_tokens: int | None = None
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def open(cls, directory: Path, *, vocabulary: int | None = None, family: str = "unknown") -> Tokenizer:
        """The tokenizer of a model folder. Raises BadTokenizer.

        `vocabulary`: rows of the model's embedding; a token beyond it is refused.
        """
        path = directory / FILE
        text = sidefile.read_text(path, most_bytes=MAX_TOKENIZER_BYTES, error=BadTokenizer)
        if text is None:
            raise BadTokenizer(_missing(directory, family))
        _check_parts(text, path)
        tokenizer = cls(_parse(text, path), where=str(path))
        largest = max(tokenizer._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if vocabulary is not None and largest >= vocabulary:
            raise BadTokenizer(f"{path}: the largest token id is {largest}; the model has {vocabulary} ids")
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is put in front. Added tokens are found wherever their text stands.

        Raises ContextExceeded for a text that cannot fit `most_tokens`, BadTokenizer where the library gives up.
        """
        most = None if self.most_tokens is None else MOST_LETTERS * self.most_tokens
        if most is not None and len(text) > most:
            raise ContextExceeded(
                f"the text has {len(text)} characters; a context of {self.most_tokens} tokens takes at most {most}: "
                "shorten it or raise --ctx"
            )
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = _guarded(lambda: self._inner.encode(text, add_special_tokens=False).ids, self.where)
        return ids

    def encode_pieces(self, chunks: Iterable[str], *, letters: int = PIECE_LETTERS) -> Iterator[tuple[list[int], int]]:
        """(token ids, bytes of their text) of a long text, piece by piece: in a row the tokens of the whole text.

        Needs memory for about `letters` characters at a time. A piece ends where the text after it has the same tokens
        with and without the text before it; while no such place is found the piece is made twice as long.
        """
        held, source, size, ended = "", iter(chunks), letters, False
        while True:
            while len(held) < size and not ended:
                chunk = next(source, None)
                ended = chunk is None
                held += chunk or ""
            if ended and len(held) <= size:
                if held:
                    yield self._encode(held), len(held.encode())
                return
            found = self._cut(held[:size])
            if found is None:
                size *= 2
                continue
            ids, place = found
            yield ids, len(held[:place].encode())
            held, size = held[place:], letters

    def _cut(self, block: str) -> tuple[list[int], int] | None:
        """(tokens before a place where a text may be cut, the place) in the second half of a block, as far as known."""
        ids = self._encode(block)
        place, lowest = len(block) - len(block) // 8, len(block) // 2
        for _ in range(_CUT_TRIES):
            place = max(block.rfind(" ", lowest, place), block.rfind("\n", lowest, place))
            if place < 0:
                return None
            if self._splits_at(block, place):
                after = self._encode(block[place:])
                if after and ids[-len(after) :] == after:
                    return ids[: -len(after)], place
        return None

    def _splits_at(self, block: str, place: int) -> bool:
        """Whether no token can reach over a place between a word and the single space or line end behind it."""
        if block[place - 1].isspace() or block[place + 1 : place + 2].isspace() or self._inner.pre_tokenizer is None:
            return False
        start = max(0, place - _CUT_VIEW)
        view = block[start : place + _CUT_VIEW]
        parts = _guarded(lambda: self._inner.pre_tokenizer.pre_tokenize_str(view), self.where)
        return any(begin == place - start for _, (begin, _) in parts)

    def token_id(self, text: str) -> int | None:
        """The id of one token by its text, None if there is none."""
        number: int | None = self._inner.token_to_id(text)
        return number

    def token_bytes(self, number: int) -> bytes:
        """The bytes of one token; none for an id without a token."""
        found = self._bytes.get(number)
        if found is None:
            found = self._bytes[number] = self._spell(number)
        return found

    def _spell(self, number: int) -> bytes:
        if number in self.added:
            return self.added[number].encode()
        if not 0 <= number < 1 << 32:
            return b""
        text: str | None = _guarded(lambda: self._inner.id_to_token(number), self.where)
        if text is None:
            return b""
        try:
            return bytes(self._alphabet[letter] for letter in text)
        except KeyError:
            return text.encode()

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of tokens, control tokens left out unless asked for; bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream(keep_special=keep_special)
        return "".join([*(stream.push(number) for number in ids), stream.finish()])

    def stream(self, *, keep_special: bool = False) -> Detokenizer:
        """A decoder that is fed token by token."""
        return Detokenizer(self, keep_special=keep_special)


class Detokenizer:
    """Text of a growing token sequence. A character is given out when its last byte has come, never in part."""

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> str:
        """The text that is complete with this token; may be empty."""
        if number in self._tokenizer.special and not self._keep_special:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(number))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", True)


def missing_file(directory: Path) -> tuple[str, str]:
    """(what is wrong, how to mend it) for a folder without tokenizer.json."""
    found = sorted(path.name for pattern in _OTHER_FILES for path in directory.glob(pattern))
    if not found:
        fault = f"{directory}: {FILE} is missing, found no tokenizer file at all"
        return fault, f"copy {FILE} from where the model's weights came from into {directory}"
    kind = " (a tiktoken vocabulary)" if any("tiktoken" in name for name in found) else ""
    return f"{directory}: {FILE} is missing, found {', '.join(found)}{kind}", (
        f"to make it: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{directory}')"
        f".save_pretrained('{directory}')\""
    )


def _missing(directory: Path, family: str) -> str:
    fault, remedy = missing_file(directory)
    return f"{fault}; model family {family}; accepted: a byte-level {FILE}; {remedy}"


def _check_parts(text: str, path: Path) -> None:
    """Refuse vocabularies whose tokens are not plain bytes, and encodings that differ from one time to the next."""
    try:
        values = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise BadTokenizer(f"{path}: not valid JSON: {error}") from error
    decoder, model = ((values.get(name) if isinstance(values, dict) else None) for name in ("decoder", "model"))
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    if kind != "ByteLevel":
        raise BadTokenizer(f"{path}: decoder is {json.dumps(kind)}; accepted: ByteLevel")
    if not isinstance(model, dict) or model.get("type", "BPE" if "merges" in model else None) != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise BadTokenizer(f"{path}: model is {json.dumps(kind)[:80]}; accepted: BPE")
    dropout = model.get("dropout")
    if dropout is not None and (isinstance(dropout, bool) or dropout != 0):
        raise BadTokenizer(
            f"{path}: model.dropout is {json.dumps(dropout)[:80]}, so that a text has other tokens each time; "
            "accepted: null or 0"
        )
    growth = _growth(values.get("normalizer"))
    if growth > MOST_GROWTH:
        raise BadTokenizer(
            f"{path}: the replacements of its normalizer make a text up to {growth} times as long; "
            f"accepted: {MOST_GROWTH} times"
        )


def _growth(normalizer: object) -> int:
    """How many times as long a text can become by the replacements of a normalizer, one after another."""
    if not isinstance(normalizer, dict):
        return 1
    growth = max(1, len(str(normalizer.get("content", "")))) if normalizer.get("type") == "Replace" else 1
    parts = normalizer.get("normalizers")
    for part in parts if isinstance(parts, list) else []:
        growth *= _growth(part)
        if growth > MOST_GROWTH:
            break
    return growth


def _parse(text: str, path: Path) -> tokenizers.Tokenizer:
    return _guarded(lambda: tokenizers.Tokenizer.from_str(text), str(path))


def _guarded(call: Callable[[], _T], where: str) -> _T:
    """What the library gives. Raises BadTokenizer where it refuses."""
    try:
        return call()
    except BaseException as error:
        # The library raises plain Exception for what it refuses, and a BaseException where its own code gives up.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            raise BadTokenizer(f"{where}: not usable: {reason}") from error
        raise


@dataclass(frozen=True, slots=True)
class StopSet:
    """Tokens that end an answer: `eos` by the configs, `roles` because the template starts or ends a turn with them."""

    eos: tuple[int, ...]
    roles: tuple[int, ...]

    @property
    def ids(self) -> frozenset[int]:
        """All of them."""
        return frozenset(self.eos) | frozenset(self.roles)


def eos_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, *, vocabulary: int | None = None
) -> tuple[int, ...]:
    """The union of `eos_token_id` of both files, ascending. Raises UnsupportedConfig naming the file."""
    found: set[int] = set()
    for where, values in (("config.json", config), ("generation_config.json", generation_config or {})):
        value = values.get("eos_token_id")
        listed = [] if value is None else value if isinstance(value, list) else [value]
        limit = 2**31 if vocabulary is None else vocabulary
        if any(type(number) is not int or not 0 <= number < limit for number in listed):
            raise UnsupportedConfig(
                f"{where}: eos_token_id is {json.dumps(value)[:80]}; accepted: a token id below {limit} or a list"
            )
        found.update(listed)
    return tuple(sorted(found))


Render = Callable[[Sequence[Mapping[str, Any]]], str]

_PROBES = {"system": "probe-system-text", "user": "probe-user-text", "assistant": "probe-answer", "tool": "probe-tool"}
_TALKS = (("system", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool"))


def role_markers(tokenizer: Tokenizer, render: Render) -> tuple[int, ...]:
    """Control tokens that a template writes right before or after the text of a turn, ascending.

    Found by rendering short talks: after any turn's text the first control token, before a turn that the model does not
    write itself the last one. A talk that the template refuses tells nothing.
    """
    found: set[int] = set()
    for roles in _TALKS:
        try:
            ids = tokenizer.encode(render([{"role": role, "content": _PROBES[role]} for role in roles]))
        except BadTemplate:
            continue
        spans = _segments(tokenizer, ids)
        for before, text, after in spans:
            if not any(probe in text for probe in _PROBES.values()):
                continue
            if after is not None:
                found.add(after)
            if before is not None and _PROBES["assistant"] not in text:
                found.add(before)
    return tuple(sorted(found))


def _segments(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[int | None, str, int | None]]:
    """Runs of text with the control token before and after each."""
    marks = [-1, *(index for index, number in enumerate(ids) if number in tokenizer.special), len(ids)]
    spans = []
    for start, end in itertools.pairwise(marks):
        before = ids[start] if start >= 0 else None
        after = ids[end] if end < len(ids) else None
        spans.append((before, tokenizer.decode(ids[start + 1 : end]), after))
    return spans


def stop_set(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    *,
    render: Render | None = None,
    vocabulary: int | None = None,
) -> StopSet:
    """What ends an answer of this model. `render`: its chat template, None where it has none."""
    eos = eos_ids(config, generation_config, vocabulary=vocabulary)
    return StopSet(eos, role_markers(tokenizer, render) if render is not None else ())
