"""What a compiled kernel's machine code says: the registers it takes, what it spills, and values that ptxas mixed up.

Input: a cubin. A `MixUp` is a value that one instruction takes for an address or a whole number and another for a
float, which no compiler means: ptxas let a register go, and reads it again where another value lies by then (12.8, as
Triton 3.6 has it, in dplr's gradients in heads of 60: benchmarks/NOTES.md). `Either` is an operand of a product that
one of two instructions of different kinds has found: ptxas gave the operand that a loop takes from before it and one
that the loop loads the same registers (12.8, in maps that walk over blocks). Finds no mix-up of two values of one kind,
nor of two that instructions of one kind found. Runs nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_Places = tuple[str, ...]  # registers "R7", and what is spilled, "+1f0", by its offset in the stack

_LINE = re.compile(r"(?:@(!?)(U?P\w+) )?([A-Z][\w.]*) ?(.*?) ?;")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPERANDS = re.compile(r",(?![^\[]*\])")
_REGISTER = re.compile(r"(?<![\w])R(\d+)")
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_LABEL = re.compile(r"`\((\.L\w+)\)")
_NUMBER = re.compile(r"^-?0x([0-9a-f]+)$")

_FLOATS = {"MUFU", "FMUL", "FADD", "FFMA", "FMNMX", "FSETP", "F2FP"}
_WHOLE = {"LOP3", "SHF", "IMAD", "ISETP", "LEA"}  # beside small numbers
_GIVE_NONE = frozenset("ST STG STS STL STSM RED REDG BAR BRA BSSY BSYNC EXIT RET NOP FSETP ISETP".split())
_JUMPS = {"BRA", "BREAK"}
_ENDS = {"EXIT", "RET", "BRX", "JMX", "CALL"}  # a function gives registers that its call does not name
_FACTORS = {"HGMMA": 1, "HMMA": 2}  # how many operands of a product of tiles may lie in registers, the left one first
_MOST = 128  # registers that one instruction gives
_SMALL = 1 << 16  # whole numbers from here on may be patterns of bits of floats
_EXPONENT = 23  # bits below it


@dataclass(frozen=True, slots=True)
class MixUp:
    """A value, by the instruction that found it, and two that take it for different things."""

    found: str
    whole: str
    real: str

    def __str__(self) -> str:
        return f"{self.found} read by {self.whole} and {self.real}"


@dataclass(frozen=True, slots=True)
class Either:
    """A product's operand, by the product, and two instructions of which each may have found it."""

    product: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.product} takes what {self.first} or {self.second} found"


@dataclass(slots=True)
class _Instruction:
    text: str
    op: str
    gives: _Places  # what it writes
    copied: _Places  # what that is a copy of, place by place, if it is
    perhaps: bool  # whether it runs under a condition
    whole: _Places  # read as an address or a whole number
    real: _Places  # read as a float
    factors: _Places  # read as operands of a product of tiles, the first place of each
    constant: bool  # whether it gives a constant, which may be both


def mixed_up(cubin: bytes) -> list[MixUp | Either]:
    """The values of a cubin that are read as two things, and the operands that may be either of two."""
    return mix_ups(_asked("nvdisasm", "-c", cubin))


def mix_ups(text: str) -> list[MixUp | Either]:
    """The same of what nvdisasm prints of a cubin."""
    blocks, after = _blocks(text)
    return _found(blocks, _reaching(blocks, after))


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and stack bytes of a cubin."""
    out = _asked("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resources: {out[:200]}")
    return int(found[1]), int(found[2])


def _asked(tool: str, what: str, cubin: bytes) -> str:
    """What one of CUDA's tools in Triton's wheel prints of a cubin."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(path), what, file.name], capture_output=True, text=True, check=True).stdout


# ---- instructions -------------------------------------------------------------------------------------------


def _blocks(text: str) -> tuple[list[list[_Instruction]], list[set[int]]]:
    """Instructions in blocks that run from start to end, and the blocks that may follow each."""
    blocks: list[list[_Instruction]] = [[]]
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    falls: set[int] = set()

    def begin(falling: bool) -> None:
        if falling:
            falls.add(len(blocks) - 1)
        blocks.append([])

    for raw in text.splitlines():
        line = _COMMENT.sub("", raw).strip()
        if line.startswith(".L") and line.endswith(":"):
            begin(True)
            labels[line[:-1]] = len(blocks) - 1
        elif match := _LINE.match(line):
            found = _instruction(match, line)
            blocks[-1].append(found)
            if found.op in _JUMPS and (target := _LABEL.search(line)):
                jumps.append((len(blocks) - 1, target[1]))
            if found.op in _JUMPS | _ENDS:
                begin(found.perhaps or found.op == "BREAK")
    after: list[set[int]] = [{i + 1} if i in falls and i + 1 < len(blocks) else set() for i in range(len(blocks))]
    for i, label in jumps:
        if label in labels:
            after[i].add(labels[label])
    return blocks, after


def _instruction(match: re.Match[str], line: str) -> _Instruction:
    unless, predicate, op, arguments = match.groups()
    base = op.split(".")[0]
    operands = [a.strip() for a in _OPERANDS.split(arguments)] if arguments else []
    first = next((i for i, a in enumerate(operands) if not re.match(r"!?U?P(T|\d)$", a)), len(operands))
    given, taken = ([], operands) if base in _GIVE_NONE else (operands[first : first + 1], operands[first + 1 :])
    width = _width(base, op)
    gives = _registers(given[0], width) if given and given[0].startswith("R") and given[0] != "RZ" else ()
    copied: _Places = ()
    constant = False
    if base == "LDL" and (slot := _STACK.search(line)):
        copied = _slots(slot, width)
    elif base == "STL" and (slot := _STACK.search(line)):
        gives, copied = _slots(slot, width), _registers(taken[-1], width)
    elif base == "MOV" or op.startswith("IMAD.MOV"):
        source = operands[-1]
        copied = _registers(source, 1) if re.match(r"R\d+", source) else ()
        constant = not copied
    elif base in ("CS2R", "HFMA2", "LDC", "IMAD") and not _REGISTER.search(",".join(taken)):
        constant = True
    whole, real = _kinds(op, operands, taken)
    factors = _all(taken[: _FACTORS.get(base, 0)])
    perhaps = unless == "!" or predicate not in (None, "PT")
    return _Instruction(line, base, gives, copied, perhaps, whole, real, factors, constant)


def _width(base: str, op: str) -> int:
    """How many registers it gives or stores."""
    parts = op.split(".")
    if base == "HGMMA":
        rows = re.search(r"HGMMA\.64x(\d+)x", op)
        return int(rows[1]) // 2 if rows else 64
    if base in ("HMMA", "LDSM"):
        return 4 if base == "HMMA" else int(parts[-1]) if parts[-1].isdigit() else 1
    if base.startswith(("LD", "ST", "CS2R", "ATOM")):
        return 4 if "128" in parts else 2 if "64" in parts else 2 if base == "CS2R" and "32" not in parts else 1
    return 2 if "WIDE" in parts or "64" in parts else 1


def _registers(operand: str, width: int) -> _Places:
    match = _REGISTER.search(operand)
    return tuple(f"R{int(match[1]) + i}" for i in range(width)) if match else ()


def _slots(slot: re.Match[str], width: int) -> _Places:
    start = int(slot[1] or "0", 16)
    return tuple(f"+{start + 4 * i:x}" for i in range(width))


def _kinds(op: str, operands: list[str], taken: list[str]) -> tuple[_Places, _Places]:
    """What is read as an address or a whole number, and what as a float; not what may be either: as functions of floats
    take them apart, by patterns of bits, by adding them, and by a shift that leaves the exponent."""
    base = op.split(".")[0]
    if base in _FLOATS:
        return (), _all(taken)
    if base == "HGMMA":  # by descriptors
        return (), ()
    addresses = [a for a in operands if a.startswith(("[", "desc"))]
    whole = [f"R{n}" for a in addresses for inside in re.findall(r"\[([^\]]*)\]", a) for n in _REGISTER.findall(inside)]
    plain = [a for a in taken if a not in addresses]
    numbers = [int(m[1], 16) for a in (plain[:3] if base == "LOP3" else plain) if (m := _NUMBER.match(a))]
    if base in _WHOLE and numbers and all(n < _SMALL and (base != "SHF" or n != _EXPONENT) for n in numbers):
        whole += _all(plain)
    return tuple(place for place in whole if place != "R1"), ()  # the stack's own


def _all(operands: list[str]) -> _Places:
    return tuple(place for a in operands for place in _registers(a, 1))


# ---- values -------------------------------------------------------------------------------------------------

_Held = dict[str, frozenset[int]]  # the values that a place may hold, by the numbers of those that found them


def _reaching(blocks: list[list[_Instruction]], after: list[set[int]]) -> list[_Held]:
    """What each place may hold at the start of each block."""
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block))
    held: list[_Held] = [{} for _ in blocks]
    waiting = set(range(len(blocks)))
    while waiting:
        i = min(waiting)  # none before those that lead to it, but for loops' ends
        waiting.remove(i)
        now = dict(held[i])
        for number, instruction in enumerate(blocks[i], starts[i]):
            _step(now, number, instruction)
        for j in after[i]:
            changed = False
            there = held[j]
            for place, values in now.items():
                old = there.get(place)
                new = values if old is None else old | values
                if new is not old and new != old:
                    there[place], changed = new, True
            if changed:
                waiting.add(j)
    return held


def _step(now: _Held, number: int, of: _Instruction) -> None:
    own = [frozenset((number * _MOST + i,)) for i in range(len(of.gives))]
    values = [now.get(c, new) for c, new in zip(of.copied, own, strict=False)] or own
    for place, value in zip(of.gives, values, strict=True):
        now[place] = value  # under a condition, too: what is there otherwise may be of no use to anyone


def _read(blocks: list[list[_Instruction]], held: list[_Held]) -> Iterator[tuple[_Instruction, _Held]]:
    """Every instruction, and what each place may hold when it reads it."""
    number = 0
    for block, start in zip(blocks, held, strict=True):
        now = dict(start)
        for instruction in block:
            yield instruction, now
            _step(now, number, instruction)
            number += 1


def _found(blocks: list[list[_Instruction]], held: list[_Held]) -> list[MixUp | Either]:
    every = [instruction for block in blocks for instruction in block]
    whole: dict[int, str] = {}
    real: dict[int, str] = {}
    either: list[Either] = []
    for instruction, now in _read(blocks, held):
        for places, kind in ((instruction.whole, whole), (instruction.real, real)):
            for place in places:
                for value in now.get(place, ()):
                    kind.setdefault(value, instruction.text)
        for place in instruction.factors:
            by = {every[n // _MOST].op: every[n // _MOST].text for n in sorted(now.get(place, ()))}
            if len(by) > 1:
                either.append(Either(instruction.text, *[*by.values()][:2]))
    both = sorted(whole.keys() & real.keys())
    mixed = [MixUp(every[n // _MOST].text, whole[n], real[n]) for n in both if not every[n // _MOST].constant]
    return [*mixed, *either]
