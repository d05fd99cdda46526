"""The C engine's environment variables in the words of this program's options, for `--compat-env`.

Must not know the options themselves, or read the environment: it is given one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

C_ENGINE: Mapping[str, tuple[str, Callable[[str], object]]] = MappingProxyType(
    {
        "NGEN": ("max_tokens", str),
        "TEMP": ("temperature", str),
        "CTX": ("ctx", str),
        "RAM_GB": ("ram", lambda text: f"{text}GB"),
        "DIRECT": ("direct", lambda text: {"0": "off", "1": "on"}.get(text, text)),
        "PROF": ("profile", str),
    }
)
"""Variables of the C engine that are an option here: its name, and the value in our words."""
C_ENGINE_FIXED: Mapping[str, str] = MappingProxyType(
    {
        "PIN_GB": "which experts stay in memory is the cache policy's choice, within --ram",
        "PIPE": "reads always overlap with multiplying",
        "MTP": "drafts are not in this version",
    }
)
"""Those that ask for something which is not a choice here, and what is done instead."""
C_ENGINE_WORDS = ("SNAP", "PROMPT")
"""The model's directory and the prompt."""
_C_ENGINE_OTHERS = """
ABLATE_OUT ABLATE_SCORE AUTOPIN CACHE_ROUTE CAP CAP_RAISE COUPLE COUPLE_D COUPLE_K CUDA_DENSE CUDA_EXPERT_GB
CUDA_RELEASE_HOST DEBUG_LOGITS DEGRADE_TAU DEGRADE_ZERO DRAFT DSA EXPERT_BUDGET EXPERT_BUDGET_EXPERIMENTAL GRAMMAR KV8
KVB_FLASH KVSAVE KV_SLOTS KV_TQ LOOKA MLOCK MOE_EXACT NUCLEUS PILOT PILOT_EVICT_GUARD PILOT_K PILOT_REAL PILOT_TWO
PILOT_WORKERS PIN PIN_FILL PIPE_WORKERS PREFETCH REF REPIN REPLAY ROUTE_TRACE RSS_GUARD_GB SCHEMA SCORE SCORE_PREFIX
SEED SERVE_BATCH SPEC_PIN STATS TOPK TOPP TRUNK_RESIDENT_LAYERS URING XEXP
"""
C_ENGINE_OTHERS = frozenset(_C_ENGINE_OTHERS.split())
"""Further variables of the C engine; so is every one that starts with COLI_."""


@dataclass(frozen=True, slots=True)
class CEngine:
    """The C engine's variables: `values` by option with the place they came from, its model and prompt, and `lines`
    for a user on those that are not taken."""

    values: Mapping[str, tuple[str, object]]
    model: str | None
    prompt: str | None
    lines: tuple[str, ...]


def c_engine(variables: Mapping[str, str]) -> CEngine:
    """What an environment holds of the C engine's variables. An empty one counts as unset."""
    given = {name: text for name, text in variables.items() if text}
    values = {
        option: (f"environment: {name}", convert(given[name]))
        for name, (option, convert) in C_ENGINE.items()
        if name in given
    }
    lines = [f"{name}={given[name]} does nothing: {why}" for name, why in C_ENGINE_FIXED.items() if name in given]
    unknown = sorted(name for name in given if name in C_ENGINE_OTHERS or name.startswith("COLI_"))
    if unknown:
        lines.append(f"variables of the C engine that are not known here: {', '.join(unknown)}")
    return CEngine(values, given.get("SNAP"), given.get("PROMPT"), tuple(lines))
