"""What a lossy mode does to the model: its logits beside the exact ones, token by token, on the same text.

Knows the engine; must not know modes or how they act. The two passes have sequences of their own, so that what a mode
leaves in the cache counts too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from picaflor.container.plain_file import read_plain
from picaflor.errors import UsageError
from picaflor.formats.base import F32

MOST_RECORD_BYTES = 4 << 20
FIGURES = ("mean_kl", "same_top", "dropped", "tokens")


class Replays(Protocol):
    """What is measured."""

    def replay_logits(self, prompt: Sequence[int], tokens: Sequence[int], *, exact: bool) -> F32:
        """Logits `[tokens, vocabulary]` after each token that follows the prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Damage:
    """`mean_kl`: nats per token from the exact distribution to the lossy one. `same_top`: share of tokens whose most
    likely successor stays. `dropped`: share of the choices of experts that were left out."""

    mean_kl: float
    same_top: float
    dropped: float
    tokens: int

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        return {name: getattr(self, name) for name in FIGURES}


def compare(exact: F32, lossy: F32, *, dropped: float) -> Damage:
    """The figures of logits `[tokens, vocabulary]` each, in float64."""
    true, found = _log_softmax(exact), _log_softmax(lossy)
    kl = (np.exp(true) * (true - found)).sum(axis=1)
    same = exact.argmax(axis=1) == lossy.argmax(axis=1)
    return Damage(float(kl.mean()), float(same.mean()), dropped, len(exact))


def read_record(path: Path, *, model: str, modes: Sequence[str]) -> dict[str, Any]:
    """The quality figures of a `bench decode --json` record of the same model and modes. Raises UsageError."""
    data = read_plain(path, most_bytes=MOST_RECORD_BYTES, error=UsageError, what="--quality-record ")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--quality-record {path}: no JSON record: {error}") from None
    found = record.get("quality") if isinstance(record, dict) else None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), int | float) for name in FIGURES):
        raise UsageError(f"--quality-record {path}: no figures {', '.join(FIGURES)} under quality")
    for name, here in (("model", model), ("lossy_modes", list(modes))):
        if record.get(name) != here:
            raise UsageError(f"--quality-record {path}: {name} {record.get(name)!r}; this run has {here!r}")
    return {name: found[name] for name in FIGURES}


def _log_softmax(logits: F32) -> np.ndarray[Any, np.dtype[np.float64]]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
