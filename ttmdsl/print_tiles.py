"""Tiles as Triton expressions: their axes and sizes, and loads and stores in the layouts of `op`'s tensors.

Input: axes, and the names of pointers and rows. Output: expressions. Does not know IR values, kernels or plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ttmdsl.ir import UNIT_AXES, Axes, base_dim


def at(text: str, axes: Axes, target: Axes) -> str:
    """Indexing that puts a value's axes among the target's."""
    if axes == target or not axes:
        return text
    return f"{text}[{', '.join(':' if x in axes else 'None' for x in target)}]"


def extent(axis: str) -> str:
    """An axis' size; with a prefix, because a dim may have any name, those of the frame's variables too."""
    return f"N_{base_dim(axis)}"


def width(axis: str) -> str:
    """The size of a tile's axis."""
    return "BT" if axis in UNIT_AXES else f"P_{base_dim(axis)}"


def shape(axes: Axes) -> str:
    """The tile's shape."""
    return "[" + ", ".join(map(width, axes)) + "]"


def numbered(axes: Axes) -> str:
    """The numbers of a tile's elements, row by row."""
    *_, last = sizes = [width(x) for x in axes] or ["1"]
    ranges = [f"tl.arange(0, {size})" for size in sizes]
    match len(axes):
        case 0:
            return "0"
        case 1:
            return ranges[0]
        case 2:
            return f"{ranges[0]}[:, None] * {last} + {ranges[1]}[None, :]"
    raise AssertionError(axes)


def offsets(axes: Axes, order: Axes) -> str:
    """Offsets of a tile inside a row-major block whose dims are `order`; axes are the tile's dims."""
    terms = []
    for x in axes:
        stride = [extent(y) for y in order[order.index(x) + 1 :]]
        terms.append(" * ".join([at(f"o_{base_dim(x)}", (x,), axes), *stride]))
    return " + ".join(terms)


def size(order: Axes) -> str:
    """Number of elements of a block."""
    return " * ".join(extent(x) for x in order)


def inside(axes: Axes) -> str:
    """Mask of a tile's dims."""
    return " & ".join(at(f"m_{base_dim(x)}", (x,), axes) for x in axes)


def _block(pointer: str, base: str, axes: Axes, order: Axes) -> str:
    """Address of a block: the base in 64 bits, what is inside in 32."""
    if not order:
        return f"{pointer} + ({base})"
    return f"({pointer} + ({base}) * ({size(order)})) + ({offsets(axes, order)})"


def load_block(pointer: str, base: str, axes: Axes, order: Axes, when: str = "") -> str:
    """Loads the tile at block number `base` of a row-major array of blocks; zero beyond the ends, and unless `when`."""
    mask = " & ".join([*([f"({when})"] if when else []), *([inside(axes)] if axes else [])])
    return f"tl.load({_block(pointer, base, axes, order)}{f', mask={mask}, other=0.0' if mask else ''})"


def store_block(pointer: str, base: str, axes: Axes, order: Axes, text: str) -> str:
    mask = f", mask={inside(axes)}" if axes else ""
    return f"tl.store({_block(pointer, base, axes, order)}, {text}{mask})"


@dataclass(frozen=True)
class Rows:
    """Where a chunk's tokens are: the first row of an array of [rows, *order], and those of its tokens from there;
    where a lone token is; and which of a chunk's have a row of their own."""

    first: str = "head"
    token: str = "row"
    lone: str = "row_h"
    alive: str = "alive"

    def entry(self, i: int, of: int) -> Rows:
        """The same of arrays that have so many entries for each, of which one is meant."""
        first, token, lone = f"({self.first} * {of} + {i})", f"{self.token} * {of}", f"{self.lone} * {of} + {i}"
        return Rows(first, token, lone, self.alive)


OF_TENSORS = Rows()
# the last of a token's parts has its row
OF_WHOLE_TOKENS = Rows("whole_head", "whole_row", alive="closing")


def of_parts(number: int) -> Rows:
    """Rows of arrays that have an entry for each part of a token."""
    return Rows(f"(whole_head * {number})", "part_row")


def token_address(pointer: str, axes: Axes, order: Axes, at_rows: Rows = OF_TENSORS) -> str:
    """Address of a per-token tile: rows of [B * T, H, *order] for the chunk's tokens, or one token's block."""
    dims = tuple(x for x in axes if x != "t")
    if "t" not in axes:
        return _block(pointer, at_rows.lone, dims, order)
    rows = at(at_rows.token, ("t",), axes)
    if not dims:
        return f"({pointer} + {at_rows.first}) + {rows}"
    terms = []
    for x in dims:
        stride = [extent(y) for y in order[order.index(x) + 1 :]]
        terms.append(" * ".join([at(f"o_{base_dim(x)}", (x,), axes), *stride]))
    return f"({pointer} + {at_rows.first} * ({size(order)})) + ({rows} * ({size(order)}) + {' + '.join(terms)})"


def token_mask(axes: Axes, live: str) -> str:
    """Mask of a per-token tile: within its dims and, if tokens are asked for, at those that are `live`."""
    parts = [at(live, ("t",), axes)] if live and "t" in axes else []
    parts += [at(f"m_{base_dim(x)}", (x,), axes) for x in axes if x != "t"]
    return " & ".join(parts)


def load_token(pointer: str, axes: Axes, order: Axes, live: bool = False, rows: Rows = OF_TENSORS) -> str:
    """Loads per-token values; with `live`, zero where there is no token, else some token's value."""
    mask = token_mask(axes, rows.alive if live else "")
    text = f"tl.load({token_address(pointer, axes, order, rows)}{f', mask={mask}, other=0.0' if mask else ''})"
    return text if any(x != "t" for x in axes) else f"{text}.to(tl.float32)"


def store_token(pointer: str, axes: Axes, order: Axes, text: str, rows: Rows = OF_TENSORS) -> str:
    mask = token_mask(axes, rows.alive)
    return f"tl.store({token_address(pointer, axes, order, rows)}, {text}{f', mask={mask}' if mask else ''})"


# ---- several values of every token, side by side: one tile, [t, as many as are a power of two] -----------------------


def load_entries(pointer: str, number: int) -> str:
    """Loads so many values of every token."""
    address, inside = _entries(pointer, number)
    return f"tl.load({address}{f', mask={inside}, other=0.0' if inside else ''}).to(tl.float32)"


def store_entries(pointer: str, texts: Mapping[int, str]) -> str:
    """Stores every token's values, from the text of each by its place."""
    address, inside = _entries(pointer, len(texts))
    tile = " + ".join(f"_tile_of_entry({text}, {i}, {_padded(len(texts))})" for i, text in sorted(texts.items()))
    return f"tl.store({address}, {tile}, mask=alive[:, None]{f' & ({inside})' if inside else ''})"


def _entries(pointer: str, number: int) -> tuple[str, str]:
    """Addresses of a tile of all, and which of its columns there are, if not all."""
    columns = f"tl.arange(0, {_padded(number)})[None, :]"
    mask = "" if _padded(number) == number else f"{columns} < {number}"
    return f"({pointer} + head * {number}) + (row[:, None] * {number} + {columns})", mask


def _padded(number: int) -> int:
    return 1 << (number - 1).bit_length()


# ---- values that one kernel saves for another: [U, H, *tile], token axes as long as the tile ----------------------


def saved_address(pointer: str, axes: Axes) -> str:
    """Address of a saved tile."""
    sizes = ["BT" if x in UNIT_AXES else extent(x) for x in axes]
    terms = []
    for i, x in enumerate(axes):
        position = at("t_" if x in UNIT_AXES else f"o_{base_dim(x)}", (x,), axes)
        terms.append(" * ".join([position, *sizes[i + 1 :]]))
    if not axes:
        return f"{pointer} + (u * H + h)"
    return f"({pointer} + (u * H + h) * ({' * '.join(sizes)})) + ({' + '.join(terms)})"


def _saved_mask(axes: Axes) -> str:
    return " & ".join(at(f"m_{base_dim(x)}", (x,), axes) for x in axes if x not in UNIT_AXES)


def load_saved(pointer: str, axes: Axes) -> str:
    mask = _saved_mask(axes)
    return f"tl.load({saved_address(pointer, axes)}{f', mask={mask}, other=0.0' if mask else ''})"


def store_saved(pointer: str, axes: Axes, text: str) -> str:
    mask = _saved_mask(axes)
    return f"tl.store({saved_address(pointer, axes)}, {text}{f', mask={mask}' if mask else ''})"
