"""Windows, delays, features and steps, reduced to what the recurrence's lowerings know: plain tensors, one per token.

Input: an `UpdateRule` as `derive` makes it, its gradients those of a window's summand. Output: the same update as a
rule without any of these, and the `Prelude`, which says how the tensors that it needs follow from the declared ones. A
window becomes the sum of its summand's gradients at delayed tensors; n gradient steps per token become n tokens. For
chunks there may be another rule: gradients of the current token, by how much each later one counts them, which asks for
the tokens before a chunk, and which there are, in place of delayed tensors; or micro-tokens, one for each token of the
window. Prints nothing: the frame's code is emit_prelude.py's.

Made names hold two underscores, which no declared name may: `k__past1` (k one token ago; where there is no such token
the current one stands in, under a weight of zero), `seen__1` (whether there is one), `k__power2`, `y__weight1`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ttmdsl.expr import Binary, Component, Const, Delay, Expr, Features, Ref, Shape, Size
from ttmdsl.past import history
from ttmdsl.prelude import FIRST, LAST, Bands, MicroTokens, Prelude, Weights, at_step, seen_name
from ttmdsl.rule import PassRule, UpdateRule
from ttmdsl.simplify_expr import ONE, ZERO, add, mul, sub
from ttmdsl.spec import LayerSpec, Memory, Pass, Tensor
from ttmdsl.walk_expr import children, rewrite, walk, with_children

MOST_MICRO = 16  # micro-tokens of a token: each takes as much memory as a token does


def unfold(rule: UpdateRule) -> tuple[UpdateRule, Prelude, list[tuple[UpdateRule, Prelude]]]:
    """The rule of single tokens and its prelude; and rules for chunks, each with the prelude of both, best first."""
    spec = rule.spec
    made = _Made(spec)
    spec = replace(spec, lets=tuple((name, made.now(e)) for name, e in spec.lets))
    found = made.of_passes(rule, made.summed)
    prelude = made.prelude()
    if prelude.empty:
        whole = replace(rule, spec=replace(rule.spec, dims=_dims(rule.spec)))
        return whole, prelude, [(whole, prelude)]

    def unfolded(found: list[tuple[Pass, PassRule]], tensors: tuple[Tensor, ...]) -> UpdateRule:
        passes, derived = tuple(p for p, _ in found), tuple(d for _, d in found)
        lets, used = _used(spec, passes, derived)
        tensors = tuple(t for t in tensors if t.kind == "param" or not used.isdisjoint((t.name, *t.each)))
        own = replace(spec, tensors=tensors, passes=passes, lets=lets)
        return replace(rule, spec=replace(own, dims=_dims(own)), passes=derived)

    whole = unfolded(found, prelude.tensors)
    prelude = replace(prelude, tensors=whole.spec.tensors, read=_only_read(whole))
    ways = [(whole, prelude)]
    if made.steps == 1 and any(p.window for p in spec.passes):
        banded = unfolded(made.of_passes(rule, made.as_band), made.prelude().tensors)
        bands = _bands(banded, whole, made.prelude())
        ways[:0] = [(banded, replace(prelude, bands=bands))] if bands else []
    size = made.micro_tokens()
    if size > 1:
        found = made.of_passes(rule, made.in_micro_tokens)
        micro = unfolded(found, (*made.prelude().tensors, *made.micro))
        both = [t for t in whole.spec.tensors if t in micro.spec.tensors]
        alone = next(t.keyword for t in whole.spec.tensors if t not in both)
        own = MicroTokens(size, micro.spec.tensors, tuple(made.micro.items()), alone)
        if any(t.kind == "input" for t in both):  # what tells how many tokens there are
            taken = replace(made.prelude(), tensors=whole.spec.tensors, micro=own, read=_only_read(micro))
            ways.insert(-1, (micro, taken))
    return whole, prelude, ways


def _bands(rule: UpdateRule, whole: UpdateRule, prelude: Prelude) -> Bands | None:
    """What the rule takes; None where gradients are made of what the past does not tell, or reach no past."""
    lets, reaching = dict(rule.spec.lets), [d for d in rule.passes if d.delays]
    roots = [e for d in reaching for e in (*(e for _, e in d.definitions), *d.gradients.values())]
    names, values = set(), {t.name: e for t, e in prelude.values}
    while roots:
        for n in walk(roots.pop()):
            if isinstance(n, Ref) and n.name not in names:
                names.add(n.name)
                roots += [lets[n.name]] if n.name in lets else []
    before = tuple(t for t in rule.spec.tensors if t.name in names and t.kind != "param")
    made = tuple(t for t in before if t.name in values)
    known = {*prelude.history, *(t.name for t in rule.spec.tensors if t.kind == "param")}
    needed = {n.name for t in made for n in walk(values[t.name]) if isinstance(n, Ref)}
    needed |= {t.name for t in before if t not in made}
    if not before or needed - known:
        return None
    alone = next(t for t in whole.spec.tensors if t not in rule.spec.tensors)
    return Bands(rule.spec.tensors, before, max(len(d.delays) for d in reaching) - 1, alone.keyword)


def _dims(spec: LayerSpec) -> tuple[str, ...]:
    """Every dim that a value has: the declared ones first, then constants and those that feature maps make."""
    shapes = [*(t.shape for t in spec.tensors), *(m.shape for m in spec.memories)]
    present = dict.fromkeys(d for shape in shapes for d in shape)
    return (*(d for d in spec.dims if d in present), *(d for d in present if d not in spec.dims))


def _only_read(rule: UpdateRule) -> tuple[str, ...]:
    """Keywords of the tensors that the layer's readout takes, and nothing before it."""
    *passes, last = rule.spec.passes
    _, used = _used(rule.spec, (*passes, replace(last, read=ZERO)), rule.passes)
    return tuple(t.keyword for t in rule.spec.tensors if t.kind != "param" and used.isdisjoint((t.name, *t.each)))


def _used(
    spec: LayerSpec, passes: tuple[Pass, ...], derived: tuple[PassRule, ...]
) -> tuple[tuple[tuple[str, Expr], ...], set[str]]:
    """Lets that the recurrence reads, and names that it reads through them."""
    roots: list[Expr] = []
    for p, d in zip(passes, derived, strict=True):
        roots += [e for _, e in d.definitions] + [*d.gradients.values(), *d.delays]
        roots += [*p.retention.values(), *p.project.values(), p.read, p.optimizer.rate]
        roots += [e for e in (p.optimizer.decay, p.optimizer.ridge, d.first, d.last) if e is not None]
    names = {n.name for root in roots for n in walk(root) if isinstance(n, Ref)}
    lets = []
    for name, e in reversed(spec.lets):
        if name in names:
            lets.append((name, e))
            names |= {n.name for n in walk(e) if isinstance(n, Ref)}
    return tuple(reversed(lets)), names


@dataclass
class _Made:
    """Collects the tensors that have to be made while it rewrites expressions in terms of them."""

    spec: LayerSpec
    past: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    firsts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    values: dict[Expr, Tensor] = field(default_factory=dict)
    weights: dict[Expr, Weights] = field(default_factory=dict)
    marks: set[str] = field(default_factory=set)
    micro: dict[Tensor, tuple[Tensor, ...]] = field(default_factory=dict)  # of which tensors each one is made

    @property
    def steps(self) -> int:
        return max(p.optimizer.per_token for p in self.spec.passes)

    @property
    def step_dim(self) -> str:
        return next((p.optimizer.step_dim for p in self.spec.passes if p.optimizer.step_dim), "")

    def prelude(self) -> Prelude:
        """What has been collected; the declared tensors first."""
        declared = [at_step(t, self.step_dim) for t in self.spec.tensors]
        marks = [_gate(name, ()) for name in sorted(self.marks)]
        seen = [_gate(seen_name(by), ()) for by in sorted(self.seen)]
        firsts = [made for made, _ in self.firsts.values()]
        weights = (t for w in self.weights.values() for t in (*w.each, w.whole))
        tensors = (*declared, *self.past.values(), *seen, *marks, *firsts, *self.values.values(), *weights)
        return Prelude(
            tensors=tensors,
            declared=self.spec.tensors,
            history=history(self.spec),
            past=tuple((made, self.spec.tensor(name), by) for (name, by), made in self.past.items()),
            seen=tuple(sorted(self.seen)),
            steps=self.steps,
            step_dim=self.step_dim,
            firsts=tuple(self.firsts.values()),
            values=tuple((made, e) for e, made in self.values.items()),
            weights=tuple(self.weights.values()),
        )

    # -- expressions ------------------------------------------------------------------------------------------------

    def now(self, e: Expr, ago: int = 0) -> Expr:
        """The expression `ago` tokens back, in terms of tensors of the current token. Lets of `derive` get a suffix."""
        match e:
            case Ref(name=name, kind="let") if ago:
                own = dict(self.spec.lets)
                return self.now(own[name], ago) if name in own else replace(e, name=f"{name}__{ago}")
            case Ref(name=name, kind="input" | "gate") if ago:
                return self._past(name, ago)
            case Delay(x=x, by=by):
                return mul(self._seen(ago + by), self.now(x, ago + by))
            case Component() | Features():
                return self._value(self.plain(e, ago))
            case Size(dim=dim) if dim in self.spec.consts:
                return Const(dim, self.spec.consts[dim])
            case _:
                return with_children(e, tuple(self.now(c, ago) for c in children(e)))

    def plain(self, e: Expr, ago: int) -> Expr:
        """The same for a value of the prelude: in declared and delayed tensors alone, lets written out."""
        match e:
            case Ref(name=name, kind="let"):
                return self.plain(dict(self.spec.lets)[name], ago)
            case Ref(name=name, kind="input" | "gate") if ago:
                return self._past(name, ago)
            case Delay(x=x, by=by):
                return mul(self._seen(ago + by), self.plain(x, ago + by))
            case _:
                return with_children(e, tuple(self.plain(c, ago) for c in children(e)))

    def _past(self, name: str, by: int) -> Ref:
        declared = self.spec.tensor(name)
        if (name, by) not in self.past:
            self.past[name, by] = replace(at_step(declared, self.step_dim), name=f"{name}__past{by}")
        made = self.past[name, by]
        return Ref(made.name, made.kind, made.shape)

    def _seen(self, by: int) -> Ref:
        self.seen.add(by)
        return Ref(seen_name(by), "gate", ())

    def _mark(self, name: str) -> Ref:
        self.marks.add(name)
        return Ref(name, "gate", ())

    def _value(self, e: Expr, name: str = "") -> Ref:
        """The made tensor that holds a value; one for equal values."""
        if e not in self.values:
            self.values[e] = Tensor(name or self._stem(e), self._kind(e), e.shape)
        made = self.values[e]
        return Ref(made.name, made.kind, made.shape)

    def _stem(self, e: Expr) -> str:
        match e:
            case Features(x=Ref(name=name), kind=kind, order=order):
                return f"{name}{'_' if '__' in name else '__'}{kind}{order}"
            case Component(x=Ref(name=name), index=index):
                return f"{name}{'_' if '__' in name else '__'}{index}"
            case _:
                return f"value__{len(self.values)}"

    def _kind(self, e: Expr) -> Literal["input", "gate"]:
        return "input" if any(isinstance(n, Ref) and n.kind == "input" for n in walk(e)) else "gate"

    # -- passes -----------------------------------------------------------------------------------------------------

    def of_passes(
        self, rule: UpdateRule, gradients: Callable[[Pass, PassRule], PassRule]
    ) -> list[tuple[Pass, PassRule]]:
        """The passes with everything in terms of made tensors, and their gradients in a form of these."""
        pairs = zip(self.spec.passes, rule.passes, strict=True)
        return [(self._of_pass(p), gradients(p, derived)) for p, derived in pairs]

    def _of_pass(self, p: Pass) -> Pass:
        optimizer = replace(
            p.optimizer,
            rate=self.now(p.optimizer.rate),
            decay=p.optimizer.decay and self.now(p.optimizer.decay),
            ridge=p.optimizer.ridge and self.now(p.optimizer.ridge),
            batch=p.optimizer.batch * self.steps if p.optimizer.batch > 1 else 1,
            per_token=1,
            step_dim="",
        )
        retention = {name: self.now(e) for name, e in p.retention.items()}
        project = {name: self.now(e) for name, e in p.project.items()}
        if self.steps > 1:
            retention = {m.name: self._once(retention[m.name], m) for m in p.memories}
            last = self._mark(LAST) if project else ONE
            project = {m.name: _where(last, project[m.name], m) for m in p.memories if m.name in project}
        read = self.now(p.read)
        return replace(p, optimizer=optimizer, retention=retention, project=project, read=read, window=None)

    def summed(self, p: Pass, derived: PassRule) -> PassRule:
        """Gradients of all tokens of the window."""
        definitions: list[tuple[str, Expr]] = []
        gradients: dict[str, Expr] = {}
        for ago in range(_size(p)):
            definitions += [(f"{n}__{ago}" if ago else n, self.now(e, ago)) for n, e in derived.definitions]
            weight = self._weight(p, ago, bands=False)
            for name, g in derived.gradients.items():
                term = self.now(g, ago) if weight == ONE else mul(weight, self.now(g, ago))
                gradients[name] = add(gradients[name], term) if ago else term
        return replace(derived, definitions=tuple(definitions), gradients=gradients)

    def as_band(self, p: Pass, derived: PassRule) -> PassRule:
        """The current token's, and how often each later one takes them."""
        if _size(p) == 1:
            return self.summed(p, derived)
        definitions = tuple((n, self.now(e)) for n, e in derived.definitions)
        gradients = {name: self.now(g) for name, g in derived.gradients.items()}
        delays = tuple(self._weight(p, ago, bands=True) for ago in range(_size(p)))
        return replace(derived, definitions=definitions, gradients=gradients, delays=delays)

    def micro_tokens(self) -> int:
        """How many micro-tokens a token may be, one for each of the window's, all of whose gradients are taken at the
        state before the token; 1 where there are none such."""
        sizes = {_size(p) for p in self.spec.passes}
        each = all(p.optimizer.batch == p.optimizer.per_token == 1 for p in self.spec.passes)
        size = max(sizes)
        return size if each and len(sizes) == 1 and size <= MOST_MICRO else 1

    def in_micro_tokens(self, p: Pass, derived: PassRule) -> PassRule:
        """The gradient of each of the window's tokens, by a micro-token of its own."""
        agos = range(_size(p))
        weighs = p.window is not None and p.window.weight is not None
        weights = [self._weight(p, ago, bands=False) if weighs else self._seen(ago) for ago in agos]
        weight = self._together(weights)

        def alike(e: Expr) -> Expr:
            return self._together([self.now(self._without_lets(e), ago) for ago in agos])

        definitions = tuple((n, alike(e)) for n, e in derived.definitions)
        gradients = {name: mul(weight, alike(g)) for name, g in derived.gradients.items()}
        first, last = self._mark(FIRST), self._mark(LAST) if p.optimizer.decay else None
        return replace(derived, definitions=definitions, gradients=gradients, group=len(agos), first=first, last=last)

    def _without_lets(self, e: Expr) -> Expr:
        """The same with declared lets written out."""
        own = dict(self.spec.lets)

        def written(n: Expr) -> Expr | None:
            known = isinstance(n, Ref) and n.kind == "let" and n.name in own
            return self._without_lets(own[n.name]) if known and isinstance(n, Ref) else None

        return rewrite(e, written)

    def _together(self, at: Sequence[Expr]) -> Expr:
        """One expression of micro-tokens for several of the same form, each of them of one of a window's tokens."""
        now = at[0]
        if isinstance(now, Ref) and now.kind in ("input", "gate"):
            parts = tuple(self._tensor(n.name) for n in at if isinstance(n, Ref))
            made = replace(parts[0], name=f"{now.name}{'_' if '__' in now.name else '__'}micro")
            assert self.micro.setdefault(made, parts) == parts
            return Ref(made.name, made.kind, made.shape)
        return with_children(now, tuple(map(self._together, zip(*map(children, at), strict=True))))

    def _tensor(self, name: str) -> Tensor:
        """A declared tensor, or one that has been made."""
        seen = (_gate(seen_name(by), ()) for by in self.seen)
        weights = (t for w in self.weights.values() for t in w.each)
        known = (*self.spec.tensors, *self.past.values(), *self.values.values(), *seen, *weights)
        return next(t for t in known if t.name == name)

    def _weight(self, p: Pass, ago: int, bands: bool) -> Expr:
        """How much the window counts the token `ago` tokens back; nothing where there is no such token, which `bands`
        know by themselves."""
        window = p.window
        if window is None or (window.weight is None and (bands or not ago)):
            return ONE
        if window.weight is None:
            return self._seen(ago)
        value = self.plain(window.weight, 0)
        if window.size == 1:
            return self._value(Component(value, 0), f"{p.name}__weight")
        if value not in self.weights:
            self.weights[value] = self._weights(p.name, value, window.size)
        found = self.weights[value]
        return Ref(found.whole.each[-1 - ago] if bands else found.each[ago].name, found.whole.kind, ())

    def _weights(self, name: str, value: Expr, size: int) -> Weights:
        kind = self._kind(value)
        given = self.spec.tensor(value.name) if isinstance(value, Ref) else None
        as_it_is = given is not None and given.kind != "param" and given.range != "decay"
        each = tuple(Tensor(f"{name}__weight{i}", kind, ()) for i in range(size))
        whole = Tensor(f"{name}__weights", kind, (), entries=size)
        return Weights(each, whole, value, given if as_it_is else None)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _once(self, retention: Expr, memory: Memory) -> Expr:
        """The retention at a token's first step, the memory as it is at the others."""
        factors = list(_factors(retention))
        decays = [f for f in factors if isinstance(f, Ref) and f.kind in ("gate", "param") and self._decays(f.name)]
        rest = [f for f in factors if f not in decays]
        if rest == [_ref(memory)]:  # a product of decays stays one: 1 is a decay, too
            return rewrite(retention, lambda n: self._first(n.name) if n in decays and isinstance(n, Ref) else None)
        return _where(self._mark(FIRST), retention, memory)

    def _decays(self, name: str) -> bool:
        return any(t.name == name and t.range == "decay" for t in [*self.spec.tensors, *self.past.values()])

    def _first(self, name: str) -> Ref:
        if name not in self.firsts:
            decay = next(t for t in [*self.spec.tensors, *self.past.values()] if t.name == name)
            own = f"{name}{'_' if '__' in name else '__'}first"
            self.firsts[name] = Tensor(own, "gate", decay.shape, "decay"), decay
        made = self.firsts[name][0]
        return Ref(made.name, "gate", made.shape)


def _size(p: Pass) -> int:
    return p.window.size if p.window else 1


def _gate(name: str, shape: Shape) -> Tensor:
    return Tensor(name, "gate", shape)


def _ref(memory: Memory) -> Ref:
    return Ref(memory.name, "memory", memory.shape)


def _where(mark: Expr, e: Expr, memory: Memory) -> Expr:
    """The expression where the mark is 1, the memory where it is 0: what is left of it is the same factor for both."""
    own = _ref(memory)
    factors = list(_factors(e))
    if factors.count(own) == 1:
        factors.remove(own)
        factor = functools.reduce(mul, factors) if factors else ONE
        return mul(add(mul(mark, factor), sub(ONE, mark)), own)
    return add(mul(mark, e), mul(sub(ONE, mark), own))


def _factors(e: Expr) -> tuple[Expr, ...]:
    return (*_factors(e.a), *_factors(e.b)) if isinstance(e, Binary) and e.op == "mul" else (e,)
