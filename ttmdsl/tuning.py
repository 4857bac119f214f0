"""Tuned tables: which launch configuration was measured to be the fastest, for which kernel, sizes and GPU.

Input: JSON files, one for each GPU, in the folders of `Options.tuned` (later ones win). Output: `Tables`, and the part
of them that a generated module carries as a literal. A kernel is known by its `signature`, which covers its program and
no layer's name. Measures nothing (bench/tune.py does), and holds no default: codegen/triton_launch.py.j2 has the rules.

A file is {"target": "sm_90", "kernels": [...], "chunks": [...], "excluded": [...]}:

- kernels: {"kernel": signature, "tiles": [sizes], "bytes": 2, "lanes": 128} is a place: the tokens of a unit and every
  dim, as padded; bytes of an input; sequences times heads. {"config": {...}} is what to launch with there, by CONFIG.
  A kernel that stores states where a backward pass may follow counts as another one where none does.
  Where that has a narrow block, or few registers, a second entry is for where it does not count. By how many programs a
  head's blocks were shared out follows from the GPU, too: what was measured by as many comes first.
- chunks: the same with the signature of a whole form, where "tiles" are the dims alone, and {"config": {"chunk": 64}}.
- excluded: configurations that were wrong or failed, with {"why": text, "triton": version}; never looked up at launch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ttmdsl.errors import LoadError
from ttmdsl.orders import ALL

if TYPE_CHECKING:
    from ttmdsl.ir import Node

# What a configuration may say, and the values it may take.
CONFIG = {
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5, 6),
    "maxnreg": (64, 80, 96, 128, 168, 255),  # most registers of a thread: 168 let three blocks of four warps be at once
    "block": (16, 32, 64, 128, 256),  # the width of the blocks that a scan's grid splits a free dim into
    "chunk": (16, 32, 64, 128),  # tokens of a unit
    "order": tuple(ALL[1:]),  # in which a kernel computes and loads its values, by its number (orders.py)
    "dims_first": (1,),  # products of 64 tokens by more dims are found as their transposes, which eight warps share
    "in_shared": (1,),  # products of a walk over blocks take from shared memory what they take from before it
    "shares": tuple(range(2, 17)),  # among so many programs a head's blocks are shared out, where it was measured
    "copied": (0,),  # of a scan's tensors those alone are copied to shared memory ahead that products take, not all
}

# Less than that counts where it was measured alone: some narrower blocks are miscompiled by Triton, and with fewer
# registers other compilers, or for other GPUs, spill.
EVERYWHERE = {"block": 64, "maxnreg": 168}

# What a module carries: by compute capability and kernel, (tiles, bytes, lanes, configuration, Triton's version).
Measured: TypeAlias = dict[int, dict[str, list[tuple[tuple[int, ...], int, int, dict[str, int], str]]]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration at one place. `us` and `default_us` are what it and the rules were measured to take."""

    kernel: str
    tiles: tuple[int, ...]
    bytes: int
    lanes: int
    config: dict[str, int]
    us: float = 0.0
    default_us: float = 0.0
    triton: str = ""
    why: str = ""

    @property
    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        return self.kernel, self.tiles, self.bytes, self.lanes

    @property
    def shared(self) -> tuple[object, ...]:
        """Its place, and by how many programs a head's blocks are shared out there, which follows from the GPU, too."""
        return self.place, self.config.get("shares", 1)

    @property
    def narrow(self) -> bool:
        """Whether it counts where it was measured alone, as blocks that are right or registers that are enough."""
        return any(self.config.get(key, least) < least for key, least in EVERYWHERE.items())


@dataclass(slots=True)
class Table:
    """What is known of one GPU, by its compute capability such as "sm_90"."""

    target: str
    kernels: list[Entry] = field(default_factory=list)
    chunks: list[Entry] = field(default_factory=list)
    excluded: list[Entry] = field(default_factory=list)

    def merge(self, other: Table) -> Table:
        """Both; at one place, shared out alike, the other's choices count, and what either excludes stays excluded."""
        kernels, chunks = (
            [*(e for e in mine if e.shared not in {e.shared for e in theirs}), *theirs]
            for mine, theirs in ((self.kernels, other.kernels), (self.chunks, other.chunks))
        )
        excluded = {(*e.place, *sorted(e.config.items())): e for e in (*self.excluded, *other.excluded)}
        return Table(self.target, kernels, chunks, list(excluded.values()))

    def to_json(self) -> str:
        """The file's text: an entry on each line."""

        def lines(entries: Iterable[Entry]) -> str:
            texts = (json.dumps({k: v for k, v in asdict(e).items() if v not in (0.0, "")}) for e in entries)
            return ",\n".join(f"    {text}" for text in texts)

        parts = {name: lines(getattr(self, name)) for name in ("kernels", "chunks", "excluded")}
        body = ",\n".join(f'  "{name}": [\n{text}\n  ]' if text else f'  "{name}": []' for name, text in parts.items())
        return f'{{\n  "target": {json.dumps(self.target)},\n{body}\n}}\n'


@dataclass(frozen=True)
class Tables:
    """The tables of all GPUs, by compute capability: 90 for "sm_90". `all_orders`: modules have every kernel in all the
    orders that there are, so that they can be measured."""

    by_capability: dict[int, Table] = field(default_factory=dict)
    all_orders: bool = False

    def orders(self, signature: str) -> tuple[int, ...]:
        """The numbers of the orders that a kernel of that signature may be launched with, beside its own."""
        if self.all_orders:
            return CONFIG["order"]
        names = signature, without_gradients(signature)
        entries = (e for table in self.by_capability.values() for e in table.kernels if e.kernel in names)
        return tuple(sorted({e.config["order"] for e in entries if "order" in e.config}))

    def kernels(self, names: dict[str, str]) -> Measured:
        """What a module carries for its kernels, given as name to signature."""
        return self._of("kernels", names)

    def chunks(self, names: dict[str, str]) -> Measured:
        """What a module carries for its forms."""
        return self._of("chunks", names)

    def _of(self, kind: str, names: dict[str, str]) -> Measured:
        found: Measured = {}
        for capability, table in sorted(self.by_capability.items()):
            known: dict[str, list[Entry]] = {}
            for entry in getattr(table, kind):
                known.setdefault(entry.kernel, []).append(entry)
            mine = {
                name: [(*e.place[1:], e.config, e.triton) for e in sorted(known[signature], key=lambda e: e.place)]
                for name, signature in names.items()
                if signature in known
            }
            if mine:
                found[capability] = mine
        return found


NOTHING = Tables()


# ---- what a module carries ----------------------------------------------------------------------------------


def tuned_table(name: str, found: Measured) -> str:
    """The source text of what a module carries of the tables."""
    from ttmdsl.templates import literal

    if not found:
        return f"{name} = {{}}"
    lines = [f"{name} = {{"]
    for capability, kernels in found.items():
        lines.append(f"    {capability}: {{")
        for kernel, entries in kernels.items():
            lines += [f"        {literal(kernel)}: (", *(f"            {literal(e)}," for e in entries), "        ),"]
        lines.append("    },")
    return "\n".join([*lines, "}"])


# ---- files --------------------------------------------------------------------------------------------------


def files(folders: Sequence[Path]) -> list[Path]:
    """The tables in the folders, in order; a folder that is missing has none."""
    return [path for folder in folders for path in sorted(folder.glob("sm_*.json"))]


def digest(folders: Sequence[Path]) -> str:
    """A hash over all tables: part of the key of a compiled module."""
    found = hashlib.sha256()
    for path in files(folders):
        try:
            found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        except OSError as error:
            raise LoadError(f"{path}: cannot read the table ({error.strerror})") from None
    return found.hexdigest()


def read_all(folders: Sequence[Path], all_orders: bool = False) -> Tables:
    """The tables of the folders, merged."""
    merged: dict[int, Table] = {}
    for path in files(folders):
        table = read(path)
        capability = int(table.target.removeprefix("sm_"))
        merged[capability] = merged[capability].merge(table) if capability in merged else table
    return Tables(merged, all_orders)


def read(path: Path) -> Table:
    """One file; what is no table is a LoadError that says where."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        target = found["target"]
        if not isinstance(target, str) or not target.removeprefix("sm_").isdecimal():
            raise ValueError(f"target: expected a GPU such as sm_90, got {target!r}")
        return Table(target, *([_entry(e) for e in found.get(kind, [])] for kind in ("kernels", "chunks", "excluded")))
    except KeyError as error:
        raise LoadError(f"{path}: not a table of launch configurations: {error} is missing") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: not a table of launch configurations: {error}") from None


def _entry(found: dict[str, Any]) -> Entry:
    entry = Entry(**{**found, "tiles": tuple(found["tiles"])})
    for number in (*entry.tiles, entry.bytes, entry.lanes):
        if type(number) is not int or number < 1:
            raise ValueError(f"expected sizes as positive integers, got {number!r}")
    for name, value in entry.config.items():
        if type(value) is not int or value not in CONFIG.get(name, ()):
            raise ValueError(f"config: expected one of {CONFIG.get(name, sorted(CONFIG))} for {name!r}, got {value!r}")
    return entry


def without_gradients(name: str) -> str:
    """What a kernel, or its signature, is called where no backward pass may follow, so that it stores no states."""
    return f"{name} without gradients"


def in_step(name: str) -> str:
    """What a kernel, or its signature, is called where each sequence has one token."""
    return f"{name} in a step"


# ---- signatures ---------------------------------------------------------------------------------------------


def signature(
    kind: str,
    roots: Iterable[Node],
    given: Iterable[Node] = (),
    rounded: Container[Node] = (),
    wide: Container[Node] = (),
) -> str:
    """What a kernel computes, whatever its layer calls it: "scan 4 products 1a2b3c4d5e6f".

    `kind` says how it runs, `given` are the values that it loads, `rounded` the states that it loads or stores in the
    inputs' dtype, `wide` its products with twice their digits. Dims and tensors count by their order of appearance.
    """
    from ttmdsl.ir import is_product, reachable

    roots, known = list(roots), set(given)
    nodes = reachable(roots, known)
    place = {node: i for i, node in enumerate(nodes)}
    axis = _Ordinals()
    leaf = _Ordinals()
    digest = hashlib.sha256(kind.encode())
    for node in nodes:
        axes = [axis(a) for a in node.axes]
        if node in known:
            text: tuple[object, ...] = ("given", axes)
        elif node.op == "leaf":
            text = ("rounded" if node in rounded else "leaf", node.role, leaf(f"{node.role} {node.name}"), axes)
        else:
            attr = [[axis(a) for a in x] if isinstance(x, tuple) else axis(x) for x in node.attr]
            text = ("wide " * (node in wide) + node.op, axes, attr, [place[a] for a in node.args])
        digest.update(repr(text).encode())
    digest.update(repr([place[r] for r in roots]).encode())
    products = sum(is_product(n) for n in nodes if n not in known)
    return f"{kind} {products} products {digest.hexdigest()[:12]}"


class _Ordinals(dict[object, object]):
    """Names by their order of appearance; token axes, and what is no name of the spec, stay as they are."""

    def __call__(self, name: object) -> object:
        from ttmdsl.ir import TOKEN_AXES, base_dim, groups

        if not isinstance(name, str) or name in TOKEN_AXES or name in ("lower", "strict") or groups(name):
            return name
        base = base_dim(name)
        return f"{self.setdefault(base, len(self))}{name[len(base) :]}"
