"""How many bytes each layer of a model takes where it is computed: what a backend of several devices shares out.

Knows specs, sizes and the cache's width; must not know devices or how layers are shared out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from picaflor.container.names import layer_of
from picaflor.formats.kv import get as kv_format
from picaflor.models.base import Model
from picaflor.models.loading import ModelIndex

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
CACHE = "f32"


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes by layer: `fixed` is what a step always needs (matrices, vectors, the cache), `experts` the routed ones.

    `first` and `last` are what the first and the last layer's devices hold besides: embedding and head.
    """

    fixed: Mapping[int, int]
    experts: Mapping[int, int]
    first: int
    last: int


def layer_bytes(model: Model, index: ModelIndex, *, tokens: int, draft: bool) -> LayerBytes:
    """Those of a model whose cache holds `tokens` tokens; with the `draft` head's layer, behind all others, or without
    it. A tied head lies where the head is as well as where the embedding is, and so does the embedding for a draft."""
    used = len(model.layers) + draft
    fixed: Counter[int] = Counter(dict.fromkeys(range(used), 0))
    embedding = index.matrices[EMBEDDING].nbytes
    head = index.matrices[HEAD].nbytes
    tied = index.matrices[HEAD].spans == index.matrices[EMBEDDING].spans
    for name, matrix in index.matrices.items():
        layer = layer_of(name)
        if layer is not None and layer < used:
            fixed[layer] += matrix.nbytes
    for name, info in index.vectors.items():
        layer = layer_of(name)
        if layer is not None and layer < used:
            fixed[layer] += 4 * info.shape[0]
    for plane in model.planes():
        if plane.layer < used:
            fixed[plane.layer] += tokens * plane.width * int(kv_format(CACHE).bytes_per_value)
    experts = {layer: sum(e.nbytes for e in found) for layer, found in index.experts.items() if layer < used}
    return LayerBytes(fixed, experts, embedding, head + embedding * (draft and not tied))
