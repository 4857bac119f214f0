"""Writes one Triton kernel, a scan or a map: what it loads and stores, and its arithmetic from the printer.

Input: a `Kernel` of a plan. Output: `KernelText` (kernel_text.py). Decides nothing about which kernels there are, nor
how a tensor is loaded or stored: kernel_writer.py does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Sequence
from dataclasses import replace

from ttmdsl.ir import Node, is_large, is_matmul
from ttmdsl.kernel_text import Argument, KernelText
from ttmdsl.kernel_writer import PREFIX, KernelWriter, printer_of
from ttmdsl.kernels import Kernel
from ttmdsl.orders import Loads, Products
from ttmdsl.prelude import Parts
from ttmdsl.printer import Names
from ttmdsl.schedule import FULL, ROWS, Weight, drawn_out, weights
from ttmdsl.spec import LayerSpec
from ttmdsl.staging import ordered
from ttmdsl.tuning import NOTHING, Tables, signature
from ttmdsl.vector_kernels import is_vector
from ttmdsl.write_alone import Alone
from ttmdsl.write_rounds import over_blocks

_NAME = re.compile(r"\b[a-zA-Z_]\w*")
_LOAD = re.compile(r"(\w+) = tl\.load\(")


def turned(kernel: Kernel) -> set[Node]:
    """Products that a kernel takes transposed, and no other way: all at once, not block by block."""
    found = set()
    for n, users in kernel.users.items():
        if is_matmul(n) and len(users) == 1 and n not in kernel.given and n not in kernel.roots:
            (user,) = users
            source, target = map(str, user.attr) if user.op == "rename" else ("", "")
            moved = tuple(target if x == source else x for x in n.axes)
            if user.op == "rename" and moved != user.axes and kernel.inner not in n.reduced:
                found.add(n)
    return found


def write_kernel(
    spec: LayerSpec,
    kernel: Kernel,
    rounded: Container[Node] = (),
    tables: Tables = NOTHING,
    tokens: int = ROWS,
    alone: Alone | None = None,
    in_halves: frozenset[Node] = frozenset(),
    parts: Parts | None = None,
) -> KernelText:
    """The text of a kernel, its body also in the orders that the tables name for it, and for programs that share out a
    dim. `rounded`: the states at the units that are in the inputs' dtype; `tokens`: of a unit; `alone`: what one
    token's step finds by itself; `in_halves`: products that take all digits of what has more than they take; `parts`:
    what it walks over, if it is no tokens."""
    weight = weights(tokens)
    transposed, few, wide = turned(kernel), tokens < ROWS, kernel.wide | in_halves
    apart = drawn_out(kernel.nodes, kernel.given, transposed, few) if kernel.kind == "map" else {}

    def write(kernel: Kernel, number: int = 0, arguments: Sequence[Argument] = ()) -> KernelText:
        text = KernelText(
            kernel.name,
            _doc(kernel),
            kernel.kind,
            arguments=[*arguments],
            blocked=kernel.blocked,
            inner=kernel.inner,
            reverse=kernel.reverse,
        )
        way = text.way
        printer = printer_of(kernel.program, spec, FULL if kernel.kind == "scan" else weight, wide)
        printer.ordering, printer.products = number, Products.of(number)
        printer.placing = Loads.of(number, kernel.kind == "scan")
        printer.turned, printer.few, printer.apart = transposed, few, apart
        writer = KernelWriter(
            spec, text, kernel.nodes, kernel.program.unit, printer, kernel.given, rounded, alone, parts
        )
        if kernel.kind == "scan":
            _write_scan(kernel, writer)
        else:
            _write_map(kernel, writer, weight)
        text.signature = _signature(kernel, way, rounded, text.parts > 1)
        return text

    whole = replace(kernel, shared="")
    text = write(whole)
    for number in tables.orders(text.signature):
        other = write(whole, number, text.arguments)
        assert replace(other, body=text.body, alive=text.alive) == replace(text, others={}), kernel.name
        again = tables.all_orders and other.body in text.others.values()  # there is nothing more to measure
        if other.body != text.body and not again:
            text.others[number] = other.body
    if kernel.shared:
        other = write(kernel, 0, text.arguments)
        assert (other.arguments, other.before, other.after) == (text.arguments, text.before, text.after), kernel.name
        text.shared, text.handed_in, text.together = other.shared, other.handed_in, other.body
    return text


def _write_scan(kernel: Kernel, writer: KernelWriter) -> None:
    """The text of a scan kernel: a walk over the units of one sequence and head. To load values when they are first
    used takes fewer registers, and is slower where there are enough."""
    text, printer = writer.text, writer.printer
    role, prefix = kernel.role, PREFIX[kernel.role]
    source, target = ("end", "start") if kernel.reverse else ("start", "end")
    leaves = kernel.leaves()
    results = dict(kernel.carried)
    loads: list[str] = []
    text.by_token = kernel.program.unit == "token"
    if text.by_token:
        text.before, text.ahead = writer.tokens(leaves)
        if writer.alone:
            text.before += writer.alone.begin(text.pointer)
            text.aside = writer.alone.end(text.pointer)
    else:
        printer.loads |= writer.within(leaves, kernel.inner)
        text.before, loads = writer.inputs(n for n in leaves if n not in printer.loads)
    loads += writer.given(kernel)
    variables: dict[str, str] = {}
    held: list[Node] = []
    for leaf in writer.waiting(kernel):
        if leaf.name in results:
            held.append(leaf)
            printer.loads[leaf] = writer.load_state("held", leaf, "here")
        else:  # it is there for the first unit alone
            printer.loads[leaf] = writer.given_state(source, leaf, "n * H + h", "step == 0")
    text.shared = kernel.shared
    if held:
        text.held, text.shared = [leaf.name for leaf in held], kernel.inner
        text.before += over_blocks(kernel.inner, (line for leaf in held for line in writer.begin(source, leaf)), True)
        text.after += over_blocks(kernel.inner, (line for leaf in held for line in writer.finish(target, leaf)), True)
    carried = {n.name: n for n in leaves if n.role == role and n not in printer.loads}
    # a carry that no unit reads is still handed from start to end
    walked = [n for n in kernel.program.leaves() if n.role == role and n not in printer.loads]
    unread = {n.name: n for n in walked if n.name in kernel.keeps}
    for name, leaf in {**carried, **unread}.items():
        variable = printer.text[leaf] = printer.names.get(prefix + name)
        # one that no unit hands on is there for the first unit alone
        when = "" if name in results else "step == 0"
        lines = writer.first_state(variable, source, leaf, "n * H + h", when)
        if name in results:
            variables[name] = variable
        (text.before if name in results else loads).extend(lines)
        if name in kernel.keeps:
            kept = loads if leaf in kernel.across else text.keep
            kept.append(writer.store_state("units", leaf, "u * H + h", variable))
    if kernel.reverse:  # states at the units' starts
        states = [leaf for leaf in leaves if leaf.role == "carry"]
        printer.loads |= {leaf: writer.loaded(leaf) for leaf in states if kernel.inner in leaf.axes}
        loads += [writer.load(leaf) for leaf in states if kernel.inner not in leaf.axes]
    found, handed = writer.handed(kernel.handed)
    text.before += found
    computed = writer.computed(kernel)
    text.body = _when_used(loads, computed) if printer.placing is Loads.LATE else [*loads, *computed]
    text.alive = round(printer.alive + sum(map(FULL, carried.values())), 1)
    ends = {k: kernel.program.builder.leaf(role, k, v.axes) for k, v in results.items()}
    for name, value in results.items():
        handed_on = name in variables or kernel.inner in value.axes
        if not handed_on:  # no unit reads it: what the last unit leaves is the end
            stores = writer.last_state(target, ends[name], "n * H + h", printer.sanitized(value))
            last = "i == length - 1" if kernel.program.unit == "token" else "step == count - 1"
            text.body += [f"if {last}:", *(f"    {line}" for line in stores)]
    new = {variable: printer.sanitized(results[k]) for k, variable in variables.items()}
    text.body += moved(printer.names, new | {k: printer.sanitized(v) for k, v in handed.items()})
    for name, variable in variables.items():
        text.after += writer.last_state(target, ends[name], "n * H + h", variable)
    if text.held:  # what one unit leaves in memory, the next one finds
        text.before.append("tl.debug_barrier()")
        text.body.append("tl.debug_barrier()")


def _when_used(loads: Sequence[str], lines: Sequence[str]) -> list[str]:
    """The lines, and before each statement among them those loads that it is the first to use; other lines among the
    loads come first."""
    known = [(line, _LOAD.match(line)) for line in loads]
    found = [line for line, load in known if not load]
    waiting = {load[1]: line for line, load in known if load}
    starts = [i for i, line in enumerate(lines) if not line.startswith((" ", "else:", "elif "))]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        statement = lines[start:end]
        used = {*_NAME.findall("\n".join(statement))}
        found += [waiting.pop(name) for name in [*waiting] if name in used]
        found += statement
    return [*found, *waiting.values()]


def moved(names: Names, new: dict[str, str]) -> list[str]:
    """Lines that give variables new values, all at once."""
    moved = [k for k in new if new[k] != k]
    staged = {k: names.get(f"{k}_next") for k in moved if len(moved) > 1}
    return [f"{staged[k]} = {new[k]}" for k in staged] + [f"{k} = {staged.get(k, new[k])}" for k in moved]


def _write_map(kernel: Kernel, writer: KernelWriter, weight: Weight) -> None:
    """The text of a map kernel: one unit of one head, all at once."""
    text, printer = writer.text, writer.printer
    leaves = kernel.leaves()
    tensors = [n for n in leaves if len(n.axes) > 1 or n.role in ("carry", "cocarry") or kernel.inner in n.axes]
    printer.loads |= {leaf: writer.loaded(leaf) for leaf in tensors}
    text.body = [line for lines in writer.inputs(leaf for leaf in leaves if leaf not in tensors) for line in lines]
    text.body += writer.given(kernel)
    printer.place = {n: i for i, n in enumerate(ordered(kernel, weight))}
    text.body += writer.computed(kernel)
    text.alive = round(printer.alive, 1)
    if all(map(is_vector, kernel.nodes)):
        text.of = " of vectors"
    elif not any(map(is_large, (*leaves, *kernel.given, *kernel.saves))):
        text.of = " of tokens"


def _signature(kernel: Kernel, way: str, rounded: Container[Node], parts: bool) -> str:
    how = f"{kernel.program.unit} {way}{' in rounds' if kernel.inner else ''}{' of parts' if parts else ''}"
    return signature(how, kernel.roots, kernel.given, rounded, kernel.wide)


def _doc(kernel: Kernel) -> str:
    names = [k for k, _ in kernel.outputs]
    if not names and kernel.kind == "map":
        return f"What is free of the carry: {', '.join(n.op for n in kernel.saves)}; every unit at once."
    what = names + [f"the carry {k}" for k, _ in kernel.carried]
    how = "unit after unit" if kernel.kind == "scan" else "every unit at once"
    way = ", last unit first" if kernel.reverse else ""
    gradients = any(f"d:{k}" in kernel.program.outputs for k in names)
    return f"{'Gradients of ' if gradients else ''}{', '.join(what)}: {how}{way}."
