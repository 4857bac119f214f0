"""Which launch configuration is the fastest, kernel by kernel: the table that later compilations take it from.

Input: `Case`s, and a `Lab` that knows this GPU. Output: a `Table`, written to its file whenever something was found.
A configuration is timed only after outputs and all gradients agreed with float64 under it, and those of all tokens
with what they are by the rules; one that is wrong, or fails, is recorded as excluded. In one trial all kernels that
take time are launched with the next configuration of each; where that goes wrong, each by itself. As many trials as are
compiled side by side are timed before the next are. Then the orders in which kernels may compute their values, each at
its fastest configuration. Then other lengths of a unit, where the layer leaves them free: one
that is faster by the rules than the kernels just tuned is taken, and its kernels are tuned, too. Touches no GPU itself:
lab.py does.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ttmdsl.bench.subjects import Case
from ttmdsl.cache import write_atomically
from ttmdsl.errors import LoadError
from ttmdsl.orders import PLACED
from ttmdsl.tuning import Entry, Table, read

Config = Mapping[str, int]
# microseconds of each kernel in a forward and backward pass, and of those that have entries of their own without
# gradients in a forward pass that none follows
Times = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Settings:
    """`budget`: seconds after which nothing new is begun. `margin`: what a configuration must gain over the rules' own.
    `negligible`: the share of a pass below which a kernel stays with the rules. `known`: a table of launches, to which
    orders of values alone are added, or, if it is to be filled (`missing`), kernels that it does not have here; till
    then these are launched by the rules; or configurations alone that say what a table did not (`only` that).
    `measured`: entries of any tables; what was best for kernels that run alike is tried first."""

    budget: float = 540.0
    margin: float = 0.02
    negligible: float = 0.02
    known: Table | None = None
    missing: bool = False
    only: str = ""
    measured: Sequence[Entry] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trial launches, kernels and forms whose units may have any length, by name; and the orders in which
    kernels may compute their values beside their own; the size of the dim that those kernels walk over which may have
    `in_shared` memory what their products take from before a walk.

    Each is an `Entry`: its place, the configuration that the rules choose, and Triton's version.
    """

    kernels: Mapping[str, Entry]
    forms: Mapping[str, Entry]
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    in_shared: Mapping[str, int] = field(default_factory=dict)

    def candidates(self, name: str) -> list[Config]:
        """What a kernel may be launched with."""
        return candidates(self.kernels[name], self.in_shared.get(name, 0))


@dataclass(frozen=True, slots=True)
class Trial:
    """A case with some kernels and forms launched in a way of their own, the others by the rules."""

    case: Case
    forced: Mapping[str, Config] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a trial, or an empty string; with some of its kernels alone, if any are named."""

    wrong: str = ""
    kernels: tuple[str, ...] = ()


class Lab(Protocol):
    """A GPU and the processes that use it, so many side by side."""

    @property
    def jobs(self) -> int: ...

    def facts(self, trial: Trial) -> Facts:
        """RuntimeError where the trial fails."""

    def check(self, trials: Sequence[Trial]) -> list[Verdict]:
        """One for each."""

    def times(self, trial: Trial) -> Times:
        """RuntimeError where the trial fails."""


def tune(
    cases: Iterable[Case],
    target: str,
    path: Path,
    settings: Settings,
    lab: Lab,
    say: Callable[[str], None] = print,
    now: Callable[[], float] = time.monotonic,
) -> Table:
    """Measures until all is done or the budget is spent; returns the table as it is on disk then."""
    table = read(path) if path.exists() else Table(target)
    if table.target != target:
        raise LoadError(f"{path}: a table for {table.target}, and this GPU is {target}")
    end = now() + settings.budget
    for case in cases:
        head = f"{case.layer} {','.join(map(str, case.shape))}"
        try:
            for what, part in _tuned(case, target, settings, lab, lambda: now() > end):
                if what:
                    say(f"{head} {what}")
                table = table.merge(part)
                _write(path, table)
        except RuntimeError as error:
            say(f"{head}: {error}")
    return table


def _write(path: Path, table: Table) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, table.to_json())
    except OSError as error:
        raise LoadError(f"{path}: cannot write the table ({error.strerror})") from None


def _tuned(
    case: Case, target: str, settings: Settings, lab: Lab, late: Callable[[], bool]
) -> Iterator[tuple[str, Table]]:
    """What was found out about each form and kernel of a case, as soon as it was; no word of what may change yet."""
    if late():
        raise RuntimeError("no time left")
    plain = Trial(case)
    wrong = lab.check([plain])[0].wrong
    if wrong:
        raise RuntimeError(f"by the rules: {wrong}")
    if settings.known:
        facts = lab.facts(plain)
        tuned, found = _launched(plain, facts, settings.known, settings, lab)
        if settings.missing:
            names = {name for name, own in facts.kernels.items() if not _there(settings.known, own)}
            yield from _kernels(tuned, target, settings, lab, late, names)
            return
        if settings.only:
            yield from _with(settings.only, tuned, found, facts, target, settings, lab, late)
            return
        yield from _orders(tuned, found, facts.orders, target, settings, lab, late)
        return
    tuned = yield from _kernels(plain, target, settings, lab, late)
    for name, entry in lab.facts(plain).forms.items():
        wrong = lab.check([tuned])[0].wrong
        if wrong:
            raise RuntimeError(f"its kernels as tuned, together: {wrong}")
        default = _microseconds(lab.times(tuned), name)
        lengths = _others(entry, [{"chunk": n} for n in (32, 64, 128)])
        *_, measured = _measured(plain, {name: lengths}, lab, late)
        chosen, excluded = _best(entry, default, lengths, measured[name], settings)
        yield f"{name}: {_line(chosen[0])}", Table(target, chunks=chosen, excluded=excluded)
        if chosen[0].config != entry.config:
            tuned = yield from _kernels(Trial(case, {name: chosen[0].config}), target, settings, lab, late)


def _kernels(
    plain: Trial,
    target: str,
    settings: Settings,
    lab: Lab,
    late: Callable[[], bool],
    only: Container[str] | None = None,
) -> Generator[tuple[str, Table], None, Trial]:
    """What was found out about each kernel of a trial, or about some `only`, the longest first, and then about the
    orders in which it may compute its values; returns the trial with all of them as they are fastest."""
    base, facts = lab.times(plain), lab.facts(plain)
    long = [name for name in _long(base, facts, settings) if only is None or name in only]
    if not long and only is not None:
        raise RuntimeError("tables have all kernels here that take long enough to be measured")
    if not long:
        return plain
    wanted = {name: _likely(facts.kernels[name], facts.candidates(name), settings.measured) for name in long}
    configs = {name: _others(facts.kernels[name], wanted[name]) for name in long}
    found: dict[str, list[Entry]] = {}
    parts: dict[str, Table] = {}
    for measured in _measured(plain, configs, lab, late):
        for name in long:
            if any(what is not None for what in measured[name]):
                entry, default = facts.kernels[name], _microseconds(base, name)
                found[name], excluded = _best(entry, default, configs[name], measured[name], settings)
                parts[name] = Table(target, kernels=found[name], excluded=excluded)
                yield "", parts[name]
    yield from _said(parts)
    tuned = Trial(plain.case, {**plain.forced, **{name: chosen[0].config for name, chosen in found.items()}})
    return (yield from _orders(tuned, found, facts.orders, target, settings, lab, late))


def _there(known: Table, own: Entry) -> list[Entry]:
    """What a table has of a kernel in this place; of narrow blocks what the same Triton was measured with."""
    return [e for e in known.kernels if e.place == own.place and (e.triton == own.triton or not e.narrow)]


def _launched(
    plain: Trial, facts: Facts, known: Table, settings: Settings, lab: Lab
) -> tuple[Trial, dict[str, list[Entry]]]:
    """The trial as a table has it, and what that has of each kernel, as measured here."""
    entries: dict[str, list[Entry]] = {}
    for name, own in facts.kernels.items():
        entries[name] = sorted(_there(known, own), key=lambda e: e.us) or [own]

    def together() -> Trial:
        return Trial(plain.case, {**plain.forced, **{name: chosen[0].config for name, chosen in entries.items()}})

    verdict = lab.check([together()])[0]
    if verdict.kernels:  # they find no room here, and are launched by the rules
        entries.update({name: [facts.kernels[name]] for name in verdict.kernels})
        verdict = lab.check([together()])[0]
    if verdict.wrong:
        raise RuntimeError(f"as the table has it: {verdict.wrong}")
    tuned = together()
    base, found = lab.times(tuned), {}
    for name in _long(base, facts, settings):
        us, (first, *others) = _microseconds(base, name), entries[name]
        found[name] = [replace(first, us=us, default_us=first.default_us or us), *others]
    return tuned, found


def _with(
    only: str,
    tuned: Trial,
    found: Mapping[str, list[Entry]],
    facts: Facts,
    target: str,
    settings: Settings,
    lab: Lab,
    late: Callable[[], bool],
) -> Iterator[tuple[str, Table]]:
    """What was found out about kernels, launched as they are, by configurations that say this one thing."""
    configs: dict[str, list[Config]] = {}
    for name in found:
        new = [config for config in facts.candidates(name) if only in config]
        configs |= {name: _others(found[name][0], new)} if new else {}
    if not configs:
        raise RuntimeError(f"no kernel here that takes long has a configuration with {only}")
    parts: dict[str, Table] = {}
    for measured in _measured(tuned, configs, lab, late):
        for name, times in measured.items():
            before, *others = found[name]
            (fastest, *rest), excluded = _best(before, before.us, configs[name], times, settings)
            if fastest.config != before.config or excluded:
                wide = sorted((e for e in (*rest, *others) if not e.narrow), key=lambda e: e.us)
                chosen = [fastest, *(wide[:1] if fastest.narrow else [])]
                kept = [replace(entry, default_us=before.default_us) for entry in chosen]
                parts[name] = Table(target, kernels=kept, excluded=excluded)
                yield "", parts[name]
    yield from _said(parts)


def _orders(
    tuned: Trial,
    found: Mapping[str, list[Entry]],
    orders: Mapping[str, Sequence[int]],
    target: str,
    settings: Settings,
    lab: Lab,
    late: Callable[[], bool],
) -> Generator[tuple[str, Table], None, Trial]:
    """What was found out about the orders in which kernels may compute their values, launched as they are, and then
    about where the fastest, and their own, have products; returns the trial with all of them as they are fastest."""
    best = {name: chosen[0] for name, chosen in found.items() if name in orders}
    parts: dict[str, Table] = {}

    def tried(numbers: Mapping[str, Iterable[int]]) -> Iterator[tuple[str, Table]]:
        configs = {name: _others(best[name], _in_orders(best[name].config, numbers[name])) for name in best}
        before = dict(best)
        for measured in _measured(trial(), configs, lab, late):
            for name, times in measured.items():
                first, *others = found[name]
                (fastest, *_), excluded = _best(before[name], before[name].us, configs[name], times, settings)
                best[name] = replace(fastest, default_us=first.default_us)
                if best[name].config != first.config or excluded:
                    parts[name] = Table(target, kernels=[best[name], *others], excluded=excluded)
                    yield "", parts[name]

    def trial() -> Trial:
        return Trial(tuned.case, {**tuned.forced, **{name: entry.config for name, entry in best.items()}})

    yield from tried({name: [0, *(n for n in orders[name] if n < PLACED)] for name in best})
    if not late():
        now = {name: (0, entry.config.get("order", 0) % PLACED) for name, entry in best.items()}
        yield from tried({name: [n for n in orders[name] if n >= PLACED and n % PLACED in now[name]] for name in best})
    yield from _said(parts)
    if late():
        raise RuntimeError("no time left")
    return trial()


def _in_orders(config: Config, numbers: Iterable[int]) -> list[Config]:
    """The configuration with each of these orders; 0 is a kernel's own."""
    own = {key: value for key, value in config.items() if key != "order"}
    return [own | ({"order": n} if n else {}) for n in sorted(numbers)]


def _said(parts: Mapping[str, Table]) -> Iterator[tuple[str, Table]]:
    """What was found out about each kernel in the end, with a word for it."""
    for name, part in parts.items():
        yield f"{name}: {_line(part.kernels[0])}", part


def _long(base: Times, facts: Facts, settings: Settings) -> list[str]:
    """Kernels that take time, the longest first; those that run beside one another are left to the rules: what one
    takes is not what both do."""
    alone = [name for name, entry in facts.kernels.items() if entry.kernel.split()[1] not in ("segment", "piece")]
    long = [name for name in alone if base.get(name, 0.0) > settings.negligible * sum(base.values())]
    return sorted(long, key=lambda name: -base[name])


def candidates(entry: Entry, walked: int = 0) -> list[Config]:
    """What a kernel may be launched with: stages where a loop can be pipelined, blocks where the grid splits a dim or
    the kernel walks over one, fewer registers where a multiprocessor has room for one block more then, or ptxas may put
    what a walk over tokens waits for in another order; products of tokens by more dims as their transposes, which eight
    warps share; fewer tensors copied ahead, which leaves a scan more room; of a walk over several blocks of a dim, its
    size `walked`, what its products take from before it in shared memory, if they take anything."""
    unit, way, *_ = entry.kernel.split()
    walks = way == "map" and "block" in entry.config
    warps = (1, 2, 4, 8) if unit == "token" else (2, 4, 8) if way == "map" else (4, 8)
    stages = (1, 2, 3) if walks else (1,) if way == "map" else (1, 2) if unit == "token" else (1, 2, 3, 4)
    widest = 128 if unit == "pairs" else max(entry.tiles)  # of tokens, or of a dim
    blocks = [{"block": n} for n in (32, 64, 128) if n <= widest] if "block" in entry.config else [{}]
    found: list[Config] = [
        {"num_warps": w, "num_stages": s, **block} for w, s, block in itertools.product(warps, stages, blocks)
    ]
    shared = unit == "chunk" and entry.bytes == 2 and entry.tiles[0] == 64 and max(entry.tiles) > 64
    found += [{**config, "dims_first": 1} for config in found if shared and config["num_warps"] == 8]
    registers = (168,) if way == "map" else (96, 128) if unit == "token" else ()
    fewer = [{**config, "maxnreg": n} for config in found for n in registers if config["num_warps"] == 4]
    copies = unit == "chunk" and way in ("scan", "reverse") and " in rounds" not in entry.kernel
    plain = [{**config, "copied": 0} for config in found if copies and config["num_stages"] > 1]
    several = [config for config in (*found, *fewer) if config.get("block", walked) < walked]
    lying = [{**config, "in_shared": 1} for config in several]
    same = {"shares": entry.config["shares"]} if "shares" in entry.config else {}
    return [{**config, **same} for config in (*lying, *found, *fewer, *plain)]


def _likely(entry: Entry, configs: Iterable[Config], measured: Iterable[Entry]) -> list[Config]:
    """Those first that were best most often for kernels that run alike, of tiles as long and as wide: there may be no
    time for all."""

    def alike(entry: Entry) -> tuple[object, ...]:
        return *entry.kernel.split()[:2], entry.tiles[0], max(entry.tiles)

    def launch(config: Config) -> frozenset[tuple[str, int]]:
        return frozenset((key, value) for key, value in config.items() if key not in ("order", "shares"))

    best = Counter(launch(other.config) for other in measured if alike(other) == alike(entry))
    return sorted(configs, key=lambda config: -best[launch(config)])


def _others(entry: Entry, configs: Iterable[Config]) -> list[Config]:
    """Those that are not what the entry has already."""
    return [config for config in configs if config != entry.config]


def _measured(
    plain: Trial, configs: Mapping[str, Sequence[Config]], lab: Lab, late: Callable[[], bool]
) -> Iterator[dict[str, list[float | str | None]]]:
    """Microseconds of each configuration of kernels or forms, or what is wrong with it; None if no time was left: after
    each round of trials those so far. RuntimeError if there was time for none."""
    found: dict[str, list[float | str | None]] = {name: [None] * len(ways) for name, ways in configs.items()}

    def trial(numbers: Mapping[str, int]) -> Trial:
        return Trial(plain.case, {**plain.forced, **{name: configs[name][i] for name, i in numbers.items()}})

    def apart(numbers: Mapping[str, int], why: str) -> list[Mapping[str, int]]:
        """Each kernel by itself, where something is wrong with several; of one it is noted."""
        if len(numbers) > 1:
            return [{name: i} for name, i in numbers.items()]
        for name, i in numbers.items():
            found[name][i] = why
        return []

    def right(rounds: Sequence[Mapping[str, int]]) -> tuple[list[Mapping[str, int]], list[Mapping[str, int]]]:
        """Those that are right, and what of the others has to be tried apart."""
        agreed: list[Mapping[str, int]] = []
        others: list[Mapping[str, int]] = []
        for numbers, verdict in zip(rounds, lab.check([trial(numbers) for numbers in rounds]), strict=True):
            if verdict.wrong and not verdict.kernels:
                others += apart(numbers, verdict.wrong)
                continue
            rest = {name: i for name, i in numbers.items() if name not in verdict.kernels}
            for name in numbers.keys() - rest.keys():
                found[name][numbers[name]] = verdict.wrong
            agreed += [rest] if rest else []
        return agreed, others

    most = max(map(len, configs.values()), default=0)
    waiting: list[Mapping[str, int]] = [{k: i for k, ways in configs.items() if i < len(ways)} for i in range(most)]
    while waiting and not late():  # as many as are compiled side by side: what is right is timed before the next
        agreed, others = right(waiting[: lab.jobs])
        for numbers in agreed:
            try:
                times = lab.times(trial(numbers))
            except RuntimeError as error:
                others += apart(numbers, str(error))
            else:
                for name, i in numbers.items():
                    found[name][i] = _microseconds(times, name)
        waiting = [*waiting[lab.jobs :], *others]
        yield found
    if not most:
        yield found
    elif all(what is None for ways in found.values() for what in ways):
        raise RuntimeError("no time left")


def _best(
    entry: Entry, default: float, configs: Sequence[Config], measured: Sequence[float | str | None], settings: Settings
) -> tuple[list[Entry], list[Entry]]:
    """The fastest of the configurations that are right, and where that is for here alone the fastest of the others;
    then those that are not right. `default`: microseconds of the entry's own."""
    own = replace(entry, us=default, default_us=default)
    found, excluded = [own], []
    for config, what in zip(configs, measured, strict=True):
        if isinstance(what, str):
            excluded.append(replace(entry, config=dict(config), why=what[:200]))
        elif what is not None and what < (1 - settings.margin) * default:
            found.append(replace(own, config=dict(config), us=what))
    found.sort(key=lambda e: e.us)
    wide = [e for e in found if not e.narrow]
    return [found[0], *(wide[:1] if found[0].narrow else [])], excluded


def _microseconds(times: Times, name: str) -> float:
    """Of one kernel, or of all where the name is a form's."""
    return round(times[name] if name in times else sum(times.values()), 1)


def _line(chosen: Entry) -> str:
    config = " ".join(f"{key}={value}" for key, value in chosen.config.items())
    return f"{config}: {chosen.us:.0f} us, by the rules {chosen.default_us:.0f} us"
