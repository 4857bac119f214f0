"""The passes in order; nothing else decides it.

Input: a spec's text and the constants that override its own. Output: the source of its module, and the result of every
stage on the way, each of which can be printed. Holds no pass itself: one file each, imported when it is its turn.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttmdsl.options import Options
from ttmdsl.tuning import NOTHING, Tables, read_all


@dataclass(frozen=True)
class Job:
    """What is being compiled, and the result of every stage that has run, by the stage's name."""

    text: str
    filename: str
    consts: Mapping[str, float]
    tables: Tables = NOTHING
    done: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A named pass: how it follows from the ones before it, and how its result is printed."""

    name: str
    run: Callable[[Job], Any]
    show: Callable[[Any], str] = str


def _parse(job: Job) -> Any:
    from ttmdsl.parse import parse

    return parse(job.text, job.filename)


def _check(job: Job) -> Any:
    from ttmdsl.check import check

    return check(job.done["parse"], job.text, job.filename, dict(job.consts))


def _derive(job: Job) -> Any:
    from ttmdsl.derive import derive

    return derive(job.done["check"])


def _lower(job: Job) -> Any:
    from ttmdsl.lower import lower

    return lower(job.done["derive"])


def _emit(job: Job) -> str:
    from ttmdsl.emit_kernel import kernel_state
    from ttmdsl.emit_module import emit_module
    from ttmdsl.explain import header
    from ttmdsl.kernel_form import LoweredKernel

    lowered = job.done["lower"]
    update = [*header(job.done["derive"]), "", *textwrap.wrap(f"Recurrence {lowered.title}.", 110)]
    if isinstance(lowered, LoweredKernel):
        return emit_module(job.done["check"], update, sections(job), kernel_state(lowered))
    prelude = lowered.prelude
    micro = prelude.micro.number if prelude.micro else 0
    how = {"bands": prelude.bands is not None, "micro": micro, "walked": lowered.walked}
    return emit_module(job.done["check"], update, sections(job), **how)


def sections(job: Job) -> dict[str, str]:
    """The source text of each backend."""
    from ttmdsl.emit_kernel import kernel_sections
    from ttmdsl.emit_prelude import emit_micro, emit_past, emit_prelude
    from ttmdsl.emit_reference import emit_reference
    from ttmdsl.emit_torch import emit_torch
    from ttmdsl.emit_triton import emit_triton
    from ttmdsl.kernel_form import LoweredKernel
    from ttmdsl.write_alone import step_alone

    spec, lowered = job.done["check"], job.done["lower"]
    if isinstance(lowered, LoweredKernel):
        return kernel_sections(lowered, job.tables)
    by_itself = step_alone(lowered) is not None
    return {
        "reference": emit_reference(spec),
        "prelude": emit_prelude(spec, lowered.prelude, by_itself, lowered.in_units, lowered.parts),
        "torch": emit_torch(lowered),
        "triton": emit_triton(lowered, job.tables),
        "past": "" if by_itself else emit_past(spec, lowered.prelude),
        "micro": emit_micro(lowered.prelude),
    }


def _show_data(result: object) -> str:
    from rich.pretty import pretty_repr

    return pretty_repr(result, max_width=110)


def _show_rule(rule: Any) -> str:
    from ttmdsl.explain import explain

    return explain(rule)


def _show_programs(lowered: Any) -> str:
    from ttmdsl.kernel_form import LoweredKernel

    if isinstance(lowered, LoweredKernel):
        return f"{lowered.title}\n\n{lowered}"
    parts = [lowered.title]
    for name in ("token", "chunk", "resumed"):
        form = getattr(lowered, name)
        if form is not None:
            parts += [f"# {name}, forward\n{form.forward}", f"# {name}, backward\n{form.backward}"]
    return "\n\n".join(parts)


# The compiler. Derivation, lowering and reverse mode know neither torch nor triton.
STAGES = (
    Stage("parse", _parse, _show_data),  # text to a syntax tree
    Stage("check", _check, _show_data),  # every name resolved, every shape known: LayerSpec
    Stage("derive", _derive, _show_rule),  # closed-form, factored gradients: UpdateRule
    Stage("lower", _lower, _show_programs),  # chunk and token programs, forward and backward
    Stage("emit", _emit),  # the module's source text
)


def compile_source(text: str, filename: str, consts: Mapping[str, float], options: Options) -> str:
    """The source of the generated module."""
    return str(run(text, filename, consts, options).done["emit"])


def run(text: str, filename: str, consts: Mapping[str, float], options: Options, after: str = STAGES[-1].name) -> Job:
    """Every stage up to and including `after`; each prints itself to `options.dump` if that is a folder."""
    job = Job(text, filename, consts, read_all(options.tuned, options.all_orders))
    for number, stage in enumerate(STAGES):
        job.done[stage.name] = stage.run(job)
        if options.dump is not None:
            options.dump.mkdir(parents=True, exist_ok=True)
            path = options.dump / f"{job.done['parse'].name.text}.{number}_{stage.name}.txt"
            path.write_text(show(job, stage.name), encoding="utf-8")
        if stage.name == after:
            break
    return job


def show(job: Job, name: str) -> str:
    """The print of a stage's result."""
    return _stages()[name].show(job.done[name]).rstrip("\n") + "\n"


@functools.cache
def _stages() -> dict[str, Stage]:
    return {stage.name: stage for stage in STAGES}
