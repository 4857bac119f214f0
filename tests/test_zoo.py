"""The shipped layers: named and shaped as the zoo's table says, and the torch backend against the reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiers import beyond

import ttmdsl
from ttmdsl.names import snake_case
from ttmdsl.parity import SHAPES, parity


def table() -> dict[str, list[str]]:
    """The cells of every layer's row in zoo.txt."""
    lines = (Path(__file__).parent / "zoo.txt").read_text().splitlines()[1:]
    cells = ([cell.strip() for cell in line.split("|")] for line in lines)
    return {name: rest for name, *rest in cells}


ROWS = table()


def declared(cell: str) -> dict[str, int]:
    """Keywords with the number of their dims, as far as the table gives them."""
    found = {}
    for name, decay, dims in re.findall(r"(\w+)(~?)(?:\[([^\]]*)\])?", cell):
        found[f"log_{name}" if decay else name] = len(dims.split(",")) if dims else 0
    return found


@pytest.mark.parametrize("layer", ttmdsl.layers())
def test_a_layer_has_the_names_of_the_table(layer: str) -> None:
    module = ttmdsl.load(layer)
    inputs, gates, params, constants, memory = ROWS[layer]
    assert set(module.INPUTS) == set(declared(inputs))
    for found, cell in ((module.GATES, gates), (module.PARAMS, params)):
        assert {name: len(dims) for name, dims in found.items()} == declared(cell)
    assert {n: float(v) for n, v in re.findall(r"(\w+)=([0-9.]+)", constants)} == module.CONSTS
    if memory != "kernel form":
        assert set(module.MEMORY) == set(declared(memory))


@pytest.mark.parametrize("layer", ttmdsl.layers())
def test_a_layer_is_exported_under_its_own_name(layer: str) -> None:
    module = ttmdsl.load(layer)
    name = re.search(r"^layer (\w+)", module.SPEC, re.MULTILINE)
    assert name is not None
    assert snake_case(name[1]) == layer
    assert getattr(module, layer) is module.op


def group(layer: str) -> int:
    """How many tokens share a gradient point if it is not told; 0 if they never do."""
    default = re.search(r"\bb=(\d+)", ROWS[layer][3])
    return int(default[1]) if default else 0


def variants() -> list[tuple[str, dict[str, float]]]:
    """Every layer as it is shipped, and those with groups of tokens also with groups of 1 and of 3."""
    found: list[tuple[str, dict[str, float]]] = []
    for layer in ROWS:
        if layer in ttmdsl.layers():
            found += [(layer, {}), *((layer, {"b": b}) for b in (1, 3) if group(layer) not in (0, b))]
    return found


LONG = [(layer, consts) for layer, consts in variants() if layer in ("atlas", "atlas_pp") and consts]


@pytest.mark.parametrize(("layer", "consts"), beyond(variants(), *LONG))
def test_torch_is_the_reference(layer: str, consts: dict[str, float]) -> None:
    torch.set_num_threads(1)
    shapes = SHAPES[4:] if consts.get("b") == 1 else SHAPES  # of a third form of a layer what is cut, and packed
    rows = parity(ttmdsl.load(layer, **consts), dtypes=(torch.float64,), shapes=shapes, backends=("torch",))
    assert [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok] == []
