"""The Triton backend of a generated module: kernels, forward and backward, and their autograd function.

Input: `Lowered` and its plans. Output: the section's source text, defining
`_triton(x, state, cu_seqlens, resumed, final)`.
The templates frame the kernels, whose text write_kernel.py writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ttmdsl.ir import DECAYED, PAST, TOKEN_AXES, UNIT_AXES, Axes, Program
from ttmdsl.kernel_text import KernelText
from ttmdsl.kernel_writer import saved_name
from ttmdsl.kernels import Kernel
from ttmdsl.lower import Lowered
from ttmdsl.lower_optimizer import NEWTON_SCHULZ
from ttmdsl.names import snake_case
from ttmdsl.past import SEEN, SEEN_KEPT
from ttmdsl.plan import Plan, plan
from ttmdsl.prelude import FIRST, Parts
from ttmdsl.replay import replay
from ttmdsl.scans import free_axis, walks_at
from ttmdsl.spec import LayerSpec
from ttmdsl.stages import stages
from ttmdsl.state import POSITION
from ttmdsl.templates import render
from ttmdsl.tile_sums import handed_on, regrouped
from ttmdsl.transfer import Transfer
from ttmdsl.tuning import EVERYWHERE, NOTHING, Tables, in_step, signature, tuned_table, without_gradients
from ttmdsl.ways import Choice
from ttmdsl.write_alone import step_alone
from ttmdsl.write_kernel import write_kernel
from ttmdsl.write_stages import StageTexts, write_stages
from ttmdsl.write_step import write_step
from ttmdsl.write_walks import write_token_backward


def token_kernel(program: Program) -> Kernel:
    """The forward kernel of the sequential form."""
    y = tuple((k, v) for k, v in program.outputs.items() if not k.startswith("carry:"))
    kept = tuple(n.name for n in program.carries())
    carried, handed = tuple(program.ends().items()), tuple(handed_on(program).items())
    kernel = Kernel("_token_forward_kernel", "scan", program, False, y, carried, kept, handed=handed)
    return replace(kernel, blocked=free_axis(program, kernel.roots))


@dataclass(frozen=True)
class FormTexts:
    """The kernels of one form as text, and which states they keep at every unit's start, as "passed" (in the dtype
    that products take) or "float32".

    `saved` and `saved_late` name the values saved by forward and by backward kernels, with the axes of their tiles;
    `across` those that later forward kernels take, and so are stored where no backward pass may follow, too.
    """

    name: str
    forward: tuple[KernelText, ...]
    backward: tuple[KernelText, ...]
    kept: dict[str, str]
    d_kept: dict[str, str]
    saved: dict[str, Axes] = field(default_factory=dict)
    saved_late: dict[str, Axes] = field(default_factory=dict)
    across: tuple[str, ...] = ()
    carry: KernelText | None = None
    transfers: tuple[tuple[Transfer, KernelText], ...] = ()

    @property
    def passed(self) -> list[str]:
        """States that pass in half precision, or whose cotangents do."""
        passing = [name for states in (self.kept, self.d_kept) for name, held in states.items() if held == "passed"]
        return [*dict.fromkeys(passing)]

    @property
    def held(self) -> list[str]:
        """States that wait in memory from unit to unit."""
        return [name for k in self.forward for name in k.held]

    @property
    def d_held(self) -> list[str]:
        """Cotangents that do."""
        return [name for k in self.backward for name in k.held]

    @property
    def reads_later(self) -> bool:
        """Whether y is read, for all units at once, of states that a scan keeps."""
        return any(k.kind == "map" for k in self.forward[walks_at(k.kind for k in self.forward).stop :])

    def unused(self) -> list[str]:
        """Values saved by forward kernels that no backward kernel takes."""
        return sorted(self.saved.keys() - _taken(self.backward, self.saved))

    def lasting(self) -> dict[str, Axes]:
        """The values saved by backward kernels that are needed to the end; of tiles those that scans or kernels before
        them take, since until a later one does, the memory is free for others."""
        last = _taken(self._steps()[-1], self.saved_late)
        early = _taken(self.backward[: walks_at(k.kind for k in self.backward).stop], self.saved_late)
        return {n: axes for n, axes in self.saved_late.items() if n in last and (len(axes) < 2 or n in early)}

    def stages(self) -> list[tuple[tuple[KernelText, ...], dict[str, Axes], list[str]]]:
        """The backward kernels, those from the first scan to the last together, each with the rooms for values that it
        is the first to use, without those that last; and all saved values that it is the last to use, unless it is the
        last."""
        steps, lasting = self._steps(), self.lasting()
        uses = [_taken(step, (*self.saved, *self.saved_late)) for step in steps]
        stages = []
        for i, step in enumerate(steps):
            earlier, later = {*lasting}.union(*uses[:i]), set().union(*uses[i + 1 :])
            made = {n: axes for n, axes in self.saved_late.items() if n in uses[i] - earlier}
            stages.append((step, made, sorted(uses[i] - later) if later else []))
        return stages

    def _steps(self) -> list[tuple[KernelText, ...]]:
        walks = walks_at(k.kind for k in self.backward)
        before, after = self.backward[: walks.start], self.backward[walks.stop :]
        return [*((k,) for k in before), self.backward[walks], *((k,) for k in after)]

    def kernels(self) -> tuple[KernelText, ...]:
        parts = (self.carry,) if self.carry else ()
        return self.forward + self.backward + parts + tuple(text for _, text in self.transfers)


def _taken(kernels: Iterable[KernelText], saved: Iterable[str]) -> set[str]:
    """Those of some saved values that kernels load or store."""
    values = {a.value for k in kernels for a in k.arguments}
    return {n for n in saved if f'saved["{n}"]' in values}


def unit_tokens(lowered: Lowered) -> int:
    """The most tokens of a chunk that its tiles leave room for."""
    programs = [p for f in lowered.kernel_forms.values() for p in (f.forward, f.backward)]
    # tiles that a chunk holds at once: with many, as a window's keys and values, shorter ones leave room for all
    vectors = max(sum(n.role == "token" and len(n.axes) > 1 for n in p.leaves()) for p in programs[::2])
    return 32 if vectors > 6 else 64


def write_forms(lowered: Lowered, tables: Tables = NOTHING) -> list[FormTexts]:
    """All kernels of a layer: the chunk forms where there are any, last the sequential form."""
    spec = lowered.rule.spec
    tokens = unit_tokens(lowered)
    tokens = max(16, min(tokens, lowered.batch)) if lowered.batch > 1 else tokens
    *chunks, (_, last) = lowered.kernel_forms.items()
    texts: list[FormTexts] = []
    choice: Choice | None = None
    for name, form in chunks:
        found = plan(name, form, tokens, choice)
        choice = found.choice
        texts.append(_form_texts(spec, found, tokens, tables, lowered.parts))
    token = token_kernel(regrouped(last.forward))
    backward = write_token_backward(spec, replay(last))
    alone = step_alone(lowered)
    step = write_step(spec, token.program, alone) if lowered.prelude.steps == 1 else None
    scans = (write_kernel(spec, token), step) if step else (write_kernel(spec, token, alone=alone),)
    for scan in scans if lowered.batch > 1 else ():
        _count(scan, lowered.batch)
    texts.append(FormTexts("token", scans, backward, dict.fromkeys(token.keeps, "float32"), {}))
    return texts


def _count(scan: KernelText, group: int) -> None:
    """Has a walk over whole sequences leave how many tokens of its group each has had then: the state's `position`."""
    pointer = scan.pointer("position_end", f'end.get("{POSITION}")', "int64")
    store = f"tl.store({pointer} + n, (offset + length) % {group})"
    scan.after += [f"if {pointer} is not None:", "    if h == 0:", f"        {store}"]


def write_staged(lowered: Lowered) -> StageTexts | None:
    """The sequential form in stages, where it has them and there is no chunk form."""
    found = None if lowered.chunk else stages(lowered.token, lowered.batch)
    return write_stages(lowered.rule.spec, found) if found else None


def _form_texts(spec: LayerSpec, p: Plan, tokens: int, tables: Tables, parts: Parts | None) -> FormTexts:
    b = p.forward[0].program.builder
    rounded = p.rounded()
    in_halves = p.in_halves(rounded)

    def write(k: Kernel) -> KernelText:
        return write_kernel(spec, k, rounded, tables, tokens, in_halves=in_halves[k.name], parts=parts)

    def kept(kernels: Iterable[Kernel], role: str) -> dict[str, str]:
        short = {n.name for n in rounded if n.role == role}
        return {name: "passed" if name in short else "float32" for k in kernels for name in k.keeps}

    return FormTexts(
        p.name,
        tuple(map(write, p.forward)),
        tuple(map(write, p.backward)),
        kept(p.forward, "carry"),
        kept(p.backward, "cocarry"),
        {saved_name(b, n, k.exact): n.axes for k in p.forward for n in k.saves},
        {saved_name(b, n, k.exact): n.axes for k in p.backward for n in k.saves},
        tuple(saved_name(b, n, k.exact) for k in p.forward for n in k.saves if n in k.across),
        write(p.parts.carry) if p.parts else None,
        tuple((t, write(kernel)) for t, kernel in p.parts.transfers) if p.parts else (),
    )


def _idle(lowered: Lowered, name: str) -> list[str]:
    """Of the tensors that a form takes those that no update of it depends on."""
    form = lowered.kernel_forms.get(name, lowered.token)
    taken = lowered.prelude.tensors if form is lowered.token or not lowered.apart else lowered.apart.tensors
    gradients = form.backward.outputs
    return [t.keyword for t in taken if not any(f"d:{own}" in gradients for own in (t.keyword, *t.each))]


def _lead(lowered: Lowered) -> str:
    """A tensor that all forms take, of whole tokens if there is such."""
    apart, parts = lowered.apart, lowered.parts
    taken = [t for t in lowered.rule.spec.tensors if t.kind != "param" and (apart is None or t in apart.tensors)]
    given = {t.keyword for t in lowered.prelude.declared or taken}
    whole = {*parts.read, *parts.own} & given if parts else set()
    return min((t.keyword for t in taken), key=lambda name: name not in whole)


def _undealt(lowered: Lowered) -> str:
    """Whether kernels are given what is of whole tokens, in terms of the tensors that they are given."""
    prelude, parts = lowered.prelude, lowered.parts
    assert parts is not None
    if prelude.micro:
        return f"{FIRST!r} in x"
    if parts.own:
        rank = next(len(t.shape) for t in prelude.tensors if t.keyword == parts.own[0])
        return f"x[{parts.own[0]!r}].dim() > {3 + rank}"
    given = {t.keyword for t in prelude.declared}
    dealt = next(
        t.keyword for t in prelude.tensors if t.keyword in given and t.kind != "param" and t.keyword not in parts.read
    )
    return f"x[{parts.read[0]!r}].shape[1] < x[{dealt!r}].shape[1]"


def emit_triton(lowered: Lowered, tables: Tables = NOTHING) -> str:
    """The section's source text, with what the tables hold for its kernels."""
    spec = lowered.rule.spec
    *chunks, token = write_forms(lowered, tables)
    staged = write_staged(lowered)
    texts = (*chunks, *((staged,) if staged else ()), token)
    kernels = [k for text in texts for k in text.kernels()]
    signatures = {name: known for k in kernels for name, known in k.signatures.items()}
    forms = lowered.kernel_forms
    form_signatures = {
        name: signature(name, [*f.forward.outputs.values(), *f.backward.outputs.values()])
        for name, f in forms.items()
        if name != "token"
    }
    programs = [p for f in forms.values() for p in (f.forward, f.backward)]
    ops = {n.op for p in programs for n in p.nodes}
    return render(
        "triton.py.j2",
        layer=snake_case(spec.name),
        chunks=chunks,
        staged=staged,
        token=token,
        forms=texts,
        kernels=kernels,
        form_signatures=form_signatures,
        signatures=signatures,
        tuned=tables.kernels(signatures),
        without_gradients=without_gradients,
        in_step=in_step,
        tuned_chunks=tables.chunks(form_signatures if lowered.batch == 1 and not lowered.prelude.micro else {}),
        tuned_table=tuned_table,
        everywhere=EVERYWHERE,
        ops=ops,
        uses={used for k in kernels for used in k.uses},
        newton_schulz=NEWTON_SCHULZ,
        chunk=lowered.whole_tokens(unit_tokens(lowered)),
        per_channel=bool(ops & DECAYED),
        cut=any(c.carry for c in chunks),
        holding=any(c.held or c.d_held for c in chunks),
        shared=[k for c in chunks for k in c.kernels() if k.shared],
        unit_axes=UNIT_AXES,
        elementwise=any(t.elementwise for c in chunks for t, _ in c.transfers),
        by_matrix=any(not t.elementwise for c in chunks for t, _ in c.transfers),
        batch=lowered.batch,
        steps=lowered.prelude.steps,
        bands=lowered.prelude.bands,
        parts=(parts := lowered.parts),
        undealt=_undealt(lowered) if parts else "",
        apart=lowered.apart,
        in_units=lowered.in_units,
        alone=(alone := step_alone(lowered)),
        left=alone.keys if alone else (),
        dealt=alone is not None and alone.steps > 1,
        past=PAST,
        seen=SEEN,
        seen_kept=SEEN_KEPT,
        token_axes=TOKEN_AXES,
        tensors={t.keyword: t.shape for t in spec.tensors},
        idle={text.name: _idle(lowered, text.name) for text in texts},
        lead=_lead(lowered),
        output=spec.passes[-1].read.shape,
    )
