"""Kernels of a first call are compiled side by side: those that it starts, with the same constants."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import ttmdsl
from ttmdsl.drawing import Shape, draw

SHAPES = [Shape("", tokens=150, heads=2, state=False), Shape("", tokens=1, state=True), Shape("", lengths=(70, 0, 5))]


def _what(known: Any, kernel: Any, grid: Any, pointers: Any, place: Any, meta: Any, options: Any) -> tuple[Any, ...]:
    kinds = [None if t is None else (t.dtype, t.shape, t.stride()) for t in (*pointers, *place)]
    if isinstance(options.get("num_warps"), tuple):  # where nothing is compiled, nothing spills
        options = {**options, "num_warps": options["num_warps"][0]}
    return known, (kernel.name, grid, kinds, meta, options)


@contextlib.contextmanager
def recorded(starts: Any, rehearsal: Any) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
    """What instances of the second class have compiled, and what those of the first start; neither does."""
    compiled: dict[Any, Any] = {}
    started: dict[Any, Any] = {}

    def rehearse(_: Any, known: Any, kernel: Any, pointers: Any, place: Any, ways: Any) -> None:
        grid, meta, options = next(iter(ways))
        compiled.setdefault(*_what(known, kernel, grid, pointers, place, meta, options))

    def start(_: Any, *about: Any) -> None:
        started.setdefault(*_what(*about))

    with (
        mock.patch.object(starts, "start", start),
        mock.patch.object(starts, "spilled", return_value=0),
        mock.patch.object(rehearsal, "fit", rehearse),
    ):
        yield compiled, started


def launches(name: str, shape: Shape, train: bool, processors: int = 0) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What is compiled ahead of a call and its backward pass, and what these start; nothing runs."""
    module = ttmdsl.load(name)
    if not hasattr(module, "_Rehearsal"):
        return {}, {}  # the kernel form has a few kernels, started by other code
    drawn = draw(module, shape)
    packed = {"cu_seqlens": torch.tensor(drawn.bounds)} if drawn.bounds else {}

    def tensors(given: Any) -> dict[str, torch.Tensor]:
        floats = {key: t.float() if t.is_floating_point() else t for key, t in (given or {}).items()}
        return {key: t.requires_grad_(train and t.is_floating_point()) for key, t in floats.items()}

    with (
        recorded(module._Schedule, module._Rehearsal) as (compiled, started),
        mock.patch.multiple(module, _COMPILES=True, _rehearsed=set(), _fitting={}),
        mock.patch.object(module, "_processors", create=True, return_value=processors),
    ):
        module._schedule.cache_clear()
        y, _ = module.op(**tensors(drawn.x), initial_state=tensors(drawn.state) or None, backend="triton", **packed)
        if train:
            y.sum().backward()
        module._schedule.cache_clear()
    return compiled, started


@pytest.mark.parametrize("name", ttmdsl.layers())
def test_all_that_is_started_was_compiled(name: str, interpreter: ProcessPoolExecutor) -> None:
    for shape in SHAPES:
        for train in (False, True):
            compiled, started = interpreter.submit(launches, name, shape, train).result()
            assert compiled == started


@pytest.mark.parametrize("name", ["gated_delta_net", "gla", "mamba2", "gsa"])
@pytest.mark.parametrize("shape", [Shape("", tokens=6500), Shape("", lengths=(6200, 70, 7000))])
def test_sequences_in_parts(name: str, shape: Shape, interpreter: ProcessPoolExecutor) -> None:
    compiled, started = interpreter.submit(launches, name, shape, True, 132).result()
    assert compiled == started
    assert any("transfer" in known[0] for known in started)


def around(name: str, train: bool, packed: bool) -> tuple[list[str], bool, bool]:
    """What a whole layer's first call starts around `op`, by its name, also when it goes on; whether all of that was
    compiled ahead, and nothing else; and whether a call like the first one leaves it at that. Nothing runs."""
    module = ttmdsl.load(name)
    layer = module.Layer(24, 2, backend="triton")
    bounds = torch.tensor([0, 3, 3, 14]) if packed else None
    x = torch.randn(1 if packed else 2, 14, 24)
    with (
        mock.patch.multiple(module, _COMPILES=True, _rehearsed=set(), _above_zero=lambda t: False),
        recorded(module._Around, module._AroundRehearsal) as (compiled, started),
        recorded(module._Schedule, module._Rehearsal),
        torch.set_grad_enabled(train),
    ):
        module._around.cache_clear()
        y, _, past = layer(x, use_cache=True, cu_seqlens=bounds)
        past = {kind: {key: t.detach() for key, t in some.items()} for kind, some in past.items()}
        y = y + layer(x, past_key_values=past, cu_seqlens=bounds)[0]
        if train:
            y.sum().backward()
        same = compiled == started
        compiled.clear()
        layer(x, use_cache=True, cu_seqlens=bounds)
        module._around.cache_clear()
    return sorted({known[0] for known in started}), same, not compiled


@pytest.mark.parametrize("name", ["gated_delta_net", "gsa", "lattice_l1"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_a_layer_starts_around_op_was_compiled(name: str, packed: bool, interpreter: ProcessPoolExecutor) -> None:
    forward = ["_layer_gated_kernel", "_layer_shape_kernel"]
    backward = ["_layer_convolved_backward_kernel", "_layer_gated_backward_kernel", "_layer_shape_backward_kernel"]
    for train in (False, True):
        found = interpreter.submit(around, name, train, packed).result()
        assert found == (sorted(forward + backward * train), True, True)


def waits() -> list[str]:
    """What happens, in order, where a kernel is started while it is being compiled."""
    module = ttmdsl.load("mamba2")
    happened: list[str] = []

    class Slow(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            happened.append("compiled")
            return ValueError("which the start will raise, too")

    kernel = SimpleNamespace(name="_a_kernel", start=lambda grid, *pointers, **constants: happened.append("started"))

    sizes = (("d_k", 16), ("d_v", 16))
    schedule = module._Schedule("chunk", (0, 64), (0,), 2, sizes, torch.float32, torch.device("cpu"))
    schedule.compiling = {("this",): Slow()}
    schedule.start(("this",), kernel, (1, 1), (), (), {}, {})
    schedule.start(("this",), kernel, (1, 1), (), (), {}, {})
    return happened


def test_a_start_waits_for_what_is_being_compiled(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(waits).result() == ["compiled", "started", "started"]


def loads() -> tuple[int, bool]:
    """How many kernels of two layers are loaded at once by threads that compile them, and whether they share a lock."""
    modules = [ttmdsl.load(name) for name in ("mamba2", "swa")]
    module, at_once, most = modules[0], [0], [0]

    class Compiled:
        @property
        def run(self) -> None:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            time.sleep(0.02)
            at_once[0] -= 1

    class Jit:
        cache_key = ""

        def warmup(self, **constants: Any) -> Compiled:
            return Compiled()

    kernels = [SimpleNamespace(name=f"_{n}_kernel", jit=Jit(), size=0) for n in range(8)]
    about = "chunk", (0, 64), (0,), 2, (("d_k", 16), ("d_v", 16)), torch.float32, torch.device("cpu")
    with mock.patch.object(module, "_ask_ptxas"), mock.patch.object(torch.cuda, "device"):
        rehearsal = module._Rehearsal(*about)
        for kernel in kernels:
            rehearsal.start((kernel.name,), kernel, (1, 1), (), (), {}, {})
        with mock.patch.object(module.os, "cpu_count", return_value=8):
            compiling = rehearsal.begin()
        for future in compiling.values():
            future.result()
    return most[0], modules[0]._loading is modules[1]._loading


def test_kernels_are_loaded_one_at_a_time(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(loads).result() == (1, True)


def tries() -> tuple[list[int], list[int], bool]:
    """In which of four ways a kernel is compiled ahead, and in which started, where the third is the first that finds
    room; and whether a start fails where none does."""
    module = ttmdsl.load("mamba2")
    full = module.triton.runtime.errors.OutOfResources(300, 200, "shared memory")
    compiled: list[int] = []
    started: list[int] = []

    def crowd(number: int) -> None:
        if number < 3:
            raise full

    class Compiled:
        def __init__(self, number: int) -> None:
            self.number = number

        @property
        def run(self) -> None:
            crowd(self.number)

    def warmup(*, grid: object, NUMBER: int, num_warps: int) -> Compiled:
        compiled.append(NUMBER)
        return Compiled(NUMBER)

    def start(grid: object, *, NUMBER: int, num_warps: int) -> None:
        started.append(NUMBER)
        crowd(NUMBER)

    kernel = SimpleNamespace(name="_a_kernel", jit=SimpleNamespace(cache_key="", warmup=warmup), size=0, start=start)

    def ways(most: int) -> Iterator[Any]:
        return (((1, 1), {"NUMBER": number}, {"num_warps": 4}) for number in range(1, most + 1))

    about = "chunk", (0, 64), (0,), 2, (("d_k", 16), ("d_v", 16)), torch.float32, torch.device("cpu")
    with mock.patch.object(module, "_ask_ptxas"), mock.patch.object(torch.cuda, "device"):
        rehearsal = module._Rehearsal(*about)
        rehearsal.fit(("this",), kernel, (), (), ways(4))
        (future,) = rehearsal.begin().values()
        future.result()
    schedule = module._Schedule(*about)
    found = schedule.fit(("this",), kernel, (), (), ways(4))
    with pytest.raises(module.triton.runtime.errors.OutOfResources):
        schedule.fit(("this",), kernel, (), (), ways(2))
    return compiled, started, found == ((1, 1), {"NUMBER": 3}, {"num_warps": 4})


def test_what_finds_no_room_is_compiled_in_the_next_way(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(tries).result() == ([1, 2, 3], [1, 2, 3, 1, 2], True)


def turns() -> tuple[list[int], bool, bool, bool]:
    """In which order kernels are read, by their numbers, that wait while another one is; whether more than one ever is;
    whether looks for garbage pause meanwhile, and go on after a failure."""
    module, order, at_once, collects = ttmdsl.load("mamba2"), [], [0], []

    def read(number: int) -> None:
        at_once[0] += 1
        order.append(number * at_once[0])
        collects.append(gc.isenabled())
        time.sleep(0.01)
        at_once[0] -= 1
        if number == 4:
            raise RuntimeError("fails")

    def in_turn(number: int) -> None:
        module._turns.number.value = number
        module._in_turn(read)(number)

    with ThreadPoolExecutor(8) as threads:
        with module._turns:
            waiting = [threads.submit(in_turn, number) for number in (3, 1, 4, 2)]
            while len(module._turns.waiting) < len(waiting):
                time.sleep(0.001)
        failed = [future.exception() is not None for future in waiting]
    return order, failed == [False, False, True, False], any(collects), gc.isenabled()


def test_kernels_are_read_in_turn(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(turns).result() == ([1, 2, 3, 4], True, False, True)


def begins() -> list[tuple[int, str]]:
    """Kernels of different sizes as they are compiled: the number of each, and its name."""
    module, begun = ttmdsl.load("mamba2"), []
    with (
        mock.patch.object(module._Compiles, "compile", lambda _, number, jit, *about: begun.append((number, jit))),
        mock.patch.object(module.os, "cpu_count", return_value=1),
    ):
        rehearsal = module._AroundRehearsal(torch.device("cpu"))
        for size in (3, 7, 5):
            kernel = SimpleNamespace(jit=f"of {size}", size=size)
            rehearsal.start((size,), kernel, (1, 1), (), (), {}, {})
        for future in rehearsal.begin().values():
            future.result()
    return begun


def test_kernels_with_most_code_are_compiled_first(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(begins).result() == [(0, "of 7"), (1, "of 5"), (2, "of 3")]


def builds() -> tuple[bool, bool, bool]:
    """Whether two threads that load kernels have the C compiler at work at once, and load what it builds one at a time;
    whether the lock is free after a failure, which is handed on; and whether what loads nothing calls it as ever."""
    module = ttmdsl.load("mamba2")
    both, alone = threading.Barrier(2, timeout=20), threading.Lock()

    def build(name: str) -> str:
        if name == "fails":
            raise RuntimeError(name)
        both.wait()
        return name

    def load(name: str) -> bool:
        with module._loading:
            module._beside(build)(name)
            first = alone.acquire(blocking=False)
            time.sleep(0.02)
            alone.release()
            return first

    def free() -> bool:
        if got := module._loading.acquire(blocking=False):
            module._loading.release()
        return got

    with ThreadPoolExecutor(2) as threads:
        loaded = all(threads.map(load, ("first", "second")))
        outside = list(threads.map(module._beside(build), ("first", "second"))) == ["first", "second"]
        with pytest.raises(RuntimeError, match="fails"):
            load("fails")
        return loaded, threads.submit(free).result(), outside


def test_the_c_compiler_builds_what_launches_several_kernels_at_once(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(builds).result() == (True, True, True)


def keys() -> tuple[bool, list[str]]:
    """Whether what stands for Triton becomes another with the time of a file's change; and what its hash is to a thread
    that compiles a kernel of a module, to one that does not meanwhile, and to the first one afterwards."""
    module = ttmdsl.load("mamba2")
    files = list(module._triton_files())
    changed = [(*files[0][:-1], files[0][-1] + 1), *files[1:]]
    stamps = []
    for found in (files, changed, files):
        module._stamp.cache_clear()
        with mock.patch.object(module, "_triton_files", return_value=found):
            stamps.append(module._stamp())
    key = module._or_stamp(lambda: "read all")
    with ThreadPoolExecutor(1) as threads, module._by_stamp():
        found = [key(), threads.submit(key).result()]
    return stamps[0] == stamps[2] != stamps[1], ["stamp" if k == stamps[0] else k for k in [*found, key()]]


def test_kernels_are_known_by_a_stamp_of_tritons_files(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(keys).result() == (True, ["stamp", "read all", "read all"])


def amends() -> list[str]:
    """Where Triton's hash is, in either of two places, of which all functions are wrapped once for two layers."""
    found: list[str] = []
    for here, there in (("cache", "compiler"), ("compiler", "cache")):
        places = {here: SimpleNamespace(triton_key=lambda: "read all"), there: SimpleNamespace()}
        source = SimpleNamespace(make_ir=lambda: None)
        triton = SimpleNamespace(
            compiler=SimpleNamespace(ASTSource=source, compiler=places["compiler"]),
            runtime=SimpleNamespace(
                cache=places["cache"], build=SimpleNamespace(_build=lambda: None), jit=SimpleNamespace()
            ),
        )
        for module in map(ttmdsl.load, ("mamba2", "swa")):
            with mock.patch.object(module, "triton", triton):
                module._amend_triton()
        lines = triton.runtime.jit.inspect.getsourcelines
        wrapped = (source.make_ir, triton.runtime.build._build, places[here].triton_key, lines)
        found.append(here if all(not hasattr(f.__wrapped__, "__wrapped__") for f in wrapped) else "twice")
    return found


def test_triton_is_amended_once(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(amends).result() == ["cache", "compiler"]


def lines(name: str, **consts: float) -> tuple[int, list[str]]:
    """How many functions Triton is to read of a module, and those of which other lines are found than Python finds; and
    the same of one in a file that is not kept."""
    module = ttmdsl.load(name, **consts)
    find = module._lines_of(inspect.getsourcelines)
    kernels = {name: k._function for name, k in vars(module).items() if isinstance(k, module._Kernel)}
    helpers = {name: f.fn for name, f in vars(module).items() if name.startswith("_tile_") and hasattr(f, "fn")}
    each = kernels | helpers | {"lines": lines}

    def text(found: tuple[list[str], int]) -> tuple[str, int]:
        return "".join(found[0]).rstrip(), found[1]

    return len(each), [name for name, f in each.items() if text(find(f)) != text(inspect.getsourcelines(f))]


@pytest.mark.parametrize(("name", "consts"), [("omega_net", {}), ("titans_linear", {"b": 64}), ("memora", {})])
def test_lines_of_kernels_are_those_that_python_finds(
    interpreter: ProcessPoolExecutor, name: str, consts: dict[str, float]
) -> None:
    number, wrong = interpreter.submit(lines, name, **consts).result()
    assert number >= 10
    assert not wrong


def imported(path: Path, text: str) -> Any:
    """The module of a text, in a file of its own."""
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(path: Path) -> list[str]:
    """What Triton knows a kernel by: of one module twice, of the same in another place, and of one of another text."""
    text = Path(str(ttmdsl.load("mamba2").__file__)).read_text(encoding="utf-8")
    found = []
    for number, own in enumerate((text, text, text + "# another\n")):
        module = imported(path / f"layer_{number}.py", own)
        with mock.patch.object(module.triton, "jit", return_value=SimpleNamespace(hash=None)):
            kernel = next(k for k in vars(module).values() if isinstance(k, module._Kernel))
            found.append(kernel.jit.hash)
    return found


def test_kernels_are_known_by_the_text_of_their_module(interpreter: ProcessPoolExecutor, tmp_path: Path) -> None:
    first, again, other = interpreter.submit(names, tmp_path).result()
    assert first == again != other


def read_late(path: Path) -> tuple[set[str], set[str], float]:
    """Which kernels Triton has read when a module is imported, and which once its file has become another, and `op` and
    its backward pass have run; then how far gradients are from the torch backend's."""
    module = imported(path, Path(str(ttmdsl.load("mamba2").__file__)).read_text(encoding="utf-8"))
    path.write_text("raise AssertionError\n" * 4000, encoding="utf-8")

    def read() -> set[str]:
        return {name for name, kernel in vars(module).items() if name.endswith("_kernel") and "jit" in vars(kernel)}

    def gradients(backend: str) -> torch.Tensor:
        x = {key: t.float().requires_grad_() for key, t in draw(module, Shape("", tokens=70, dims=(16,))).x.items()}
        found = torch.autograd.grad(module.op(**x, backend=backend)[0].square().sum(), [*x.values()])
        return torch.cat([g.flatten() for g in found])

    before, own, other = read(), gradients("triton"), gradients("torch")
    return before, read(), float((own - other).norm() / other.norm())


def test_a_kernel_is_read_when_it_is_first_started_as_it_was_imported(
    tmp_path: Path, interpreter: ProcessPoolExecutor
) -> None:
    before, after, error = interpreter.submit(read_late, tmp_path / "layer.py").result()
    assert before == set()
    assert after == {f"_chunk_{k}_kernel" for k in ("forward_scan", "backward_scan", "backward_1_1", "backward_1_2")}
    assert error < 1e-5
