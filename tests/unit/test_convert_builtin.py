"""The built-in model: small enough to ship, in the formats its card states, and what the command makes."""

from __future__ import annotations

import json
from pathlib import Path

from picaflor.container.index import Container
from picaflor.convert.converter import convert
from picaflor.models.loading import open_model
from picaflor.runtime import builtin


def test_it_is_small_and_in_the_formats_of_its_card() -> None:
    folder = builtin.folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 25_000_000
    with Container.open(folder) as container:
        model, index = open_model(container)
    assert model.draft is not None
    formats: dict[str, set[tuple[str, int]]] = {}
    for spec in model.matrices():
        found = index.matrices[spec.name]
        place = "draft" if spec.name.startswith("model.layers.8.") else spec.kind
        formats.setdefault(place, set()).add((found.format, found.group_size))
    for layer, experts in index.experts.items():
        for matrix in (matrix for expert in experts for matrix in expert.matrices):
            formats.setdefault("draft" if layer == 8 else "expert", set()).add((matrix.format, matrix.group_size))
    four_bits = {("int4-grouped", 64)}
    assert formats == {
        "embedding": {("int8-row", 0)},
        "head": {("int8-row", 0)},
        "indexer": {("int8-row", 0)},
        "router": {("f32", 0)},
        "draft": {("int8-row", 0), ("f32", 0)},
        "attention": four_bits,
        "kv_b": four_bits,
        "dense": four_bits,
        "shared": four_bits,
        "expert": four_bits,
    }
    assert len(index.experts) == 8
    assert {len(experts) for experts in index.experts.values()} == {24}
    assert json.loads((folder / "config.json").read_text())["latent_norm_eps"] == 1e-6


def test_the_command_makes_the_files_that_are_shipped(test_data: Path, tmp_path: Path) -> None:
    convert(test_data / "models" / "tiny-glm-dsa", tmp_path / "out")
    shipped = {path.name: path for path in builtin.folder().iterdir() if path.name != "README.md"}
    made = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert sorted(made) == sorted(shipped)
    for name, path in made.items():
        assert path.read_bytes() == shipped[name].read_bytes(), name
