"""The prelude section of a generated module: tensors made for all tokens at once, before a derived backend runs.

Input: a `LayerSpec` and the `Prelude` that unfold.py found for it. Output: source text that defines `_prelude` and the
helpers it needs, or "" where the backends take the declared tensors as they are. What it makes is made by torch under
autograd, so gradients flow through it. The reference does not use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ttmdsl import expr as ex
from ttmdsl import spec as s
from ttmdsl.past import SEEN_KEPT, kept_name, past_name
from ttmdsl.prelude import FIRST, LAST, Parts, Prelude, seen_name
from ttmdsl.print_reference import Printer, fn_params
from ttmdsl.templates import render
from ttmdsl.walk_expr import walk


def emit_prelude(
    spec: s.LayerSpec, prelude: Prelude, alone: bool = False, in_units: bool = False, parts: Parts | None = None
) -> str:
    """The section's source text; its surroundings import torch. `alone`: a step's kernel finds the past by itself.
    `in_units`: one token with gradients may be a unit, too, in Triton. `parts`: what chunks walk over there, if it is
    no tokens."""
    if prelude.empty:
        return ""
    nodes = [n for e in (*(e for _, e in prelude.values), *(w.value for w in prelude.weights)) for n in walk(e)]
    stepped = [t.keyword for t in spec.tensors if prelude.stepped(t)]
    bands = prelude.bands
    taken = bands.tensors if bands else prelude.tensors
    weights = {w.whole: w.value for w in prelude.weights if not w.given}
    shared = _Values(spec, prelude, [v for v in prelude.values if v[0] in taken or not bands], weights)
    rest = _Values(spec, prelude, [v for v in prelude.values if v not in shared.made])
    before = bands.before if bands else ()
    known = {*(t.keyword for t in taken), *(t["keyword"] for t in shared.sources())}
    return render(
        "prelude.py.j2",
        prelude=prelude,
        alone=alone,
        in_units=in_units,
        takes=[t.keyword for t in prelude.tensors],
        ends=[(past_name(spec.tensor(name)), spec.tensor(name).keyword) for name in prelude.history],
        past=_past(prelude),
        stepped=[*stepped, *(made.keyword for made, t, _ in prelude.past if prelude.stepped(t))],
        marks=[t.name for t in prelude.tensors if t.name in (FIRST, LAST)],
        firsts=[(made.keyword, t.keyword, t.kind == "param") for made, t in prelude.firsts],
        values=[*shared.values(), *rest.values()],
        windows=prelude.weights,
        seen_in_chunks=[by for by in prelude.seen if not bands or seen_name(by) in known],
        seen_kept=SEEN_KEPT,
        shared=shared,
        rest=rest,
        bands=bands,
        micro=prelude.micro,
        read=parts.read if parts else (),
        whole=(*parts.read, *parts.own) if parts and not prelude.micro else (),
        dealt=_dealt(prelude, [t["keyword"] for v in (shared, rest) for t in v.sources()]),
        chunks_take=[*(t.keyword for t in taken), *map(kept_name, before), SEEN_KEPT],
        before=[(kept_name(t), past_name(t)) for t in before if t.name in prelude.history],
        before_made=_Values(spec, prelude, [v for v in prelude.values if v[0] in before]),
        features={n.kind for n in nodes if isinstance(n, ex.Features)},
        batch=max(p.optimizer.batch for p in spec.passes),
        leader=next(t.keyword for t in spec.tensors if t.kind != "param"),
    )


def emit_past(spec: s.LayerSpec, prelude: Prelude) -> str:
    """The source text of the kernel by which one token's step finds the past and leaves the next one's; "" where there
    is none."""
    past = [(spec.tensor(name).keyword, depth) for name, depth in prelude.history.items()]
    return render("past_kernel.py.j2", past=past) if past else ""


def _past(prelude: Prelude) -> list[tuple[str, dict[int, str]]]:
    """Tensors that are taken some tokens ago: keyword, and what each number makes."""
    found: dict[str, dict[int, str]] = {}
    for made, tensor, by in prelude.past:
        found.setdefault(tensor.keyword, {})[by] = made.keyword
    return [*found.items()]


def emit_micro(prelude: Prelude) -> str:
    """The source text of the kernels by which tokens are dealt out to micro-tokens; "" where there are none."""
    return render("micro_kernel.py.j2", number=prelude.micro.number) if prelude.micro else ""


def _dealt(prelude: Prelude, needed: Iterable[object]) -> list[str]:
    """Tensors that chunks take of each of a window's tokens, but for those whose pasts something else is made of."""
    micro = prelude.micro
    if micro is None:
        return []
    pasts = {made: (tensor, by) for made, tensor, by in prelude.past}
    uses = Counter([*needed, *(t.keyword for t in micro.repeated), *(t.keyword for _, of in micro.parts for t in of)])

    def alone(of: tuple[s.Tensor, ...]) -> bool:
        return all(pasts.get(t) == (of[0], by) and uses[t.keyword] == 1 for by, t in enumerate(of) if by)

    return [of[0].keyword for _, of in micro.parts if alone(of)]


@dataclass(frozen=True)
class _Values:
    """Tensors that are made of others, and by what; and weights of windows that are."""

    spec: s.LayerSpec
    prelude: Prelude
    made: list[tuple[s.Tensor, ex.Expr]]
    weights: Mapping[s.Tensor, ex.Expr] = field(default_factory=dict)

    def values(self) -> list[dict[str, object]]:
        """What the template needs to make all of them."""
        return [*self.each(), *(_value(self.spec, tensor, e) for tensor, e in self.weights.items())]

    def each(self) -> list[dict[str, object]]:
        """The same but for weights of windows."""
        return [_value(self.spec, tensor, e) for tensor, e in self.made]

    def sources(self) -> list[dict[str, object]]:
        """What they are made of, and what their code asks for sizes."""
        nodes = [n for e in (*(e for _, e in self.made), *self.weights.values()) for n in walk(e)]
        names = {n.name for n in nodes if isinstance(n, ex.Ref)}
        sizes = {n.dim for n in nodes if isinstance(n, ex.Size)}
        names |= {next((t.name for t in self.spec.tensors if dim in t.shape), "") for dim in sizes}
        applied = {n.fn for n in nodes if isinstance(n, ex.Apply)} & self.spec.fns.keys()
        names |= {name for fn in applied for name in fn_params(self.spec.fns[fn])}
        seen = [s.Tensor(f"seen__{by}", "gate", ()) for by in self.prelude.seen]
        known = (*self.spec.tensors, *(made for made, _, _ in self.prelude.past), *seen)
        return [
            {
                "name": t.name,
                "keyword": t.keyword,
                "decay": t.range == "decay",
                "past": past_name(t) if t.name in self.prelude.history else "",
            }
            for t in known
            if t.name in names
        ]


def _value(spec: s.LayerSpec, tensor: s.Tensor, e: ex.Expr) -> dict[str, object]:
    """A made tensor: the lines of the function that makes it."""
    first = next((n.name for n in walk(e) if isinstance(n, ex.Ref)), "")
    printer = Printer(spec, f'x["{first}"]', ("x",), prefix="_")
    text = printer.tensor(printer.expr(e)).text
    return {
        "keyword": tensor.keyword,
        "kept": kept_name(tensor),
        "function": f"_make_{tensor.name}",
        "definitions": list(printer.definitions),
        "text": text,
        "rank": len(tensor.shape),
        "input": tensor.kind == "input",
    }
