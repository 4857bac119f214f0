"""The backward pass of the sequential form, a piece of every sequence at a time: the same gradients, whatever its size,
in Triton's interpreter."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import beyond

import ttmdsl

# carries of a group, weights that are params, several memories, vectors that the first walk leaves
LAYERS: dict[str, dict[str, float]] = {
    "lattice_dec": {},
    "trellis": {"b": 5},
    "ttt_norm": {},
    "mesa": {},
    "titans": {"b": 3},
}
SHAPES: tuple[dict[str, Any], ...] = (
    {"label": "packed 40+3+0+17", "dims": (5, 3, 4), "heads": 2, "lengths": (40, 3, 0, 17)},
    {"label": "T=35", "dims": (4,), "tokens": 35, "state": False},
)


def misses(layer: str, consts: dict[str, float], room: int) -> tuple[list[str], list[int]]:
    """What a layer misses where so many states of a head may be found again at once, and how many segments pieces had;
    in the other process."""
    import torch

    from ttmdsl.drawing import Shape
    from ttmdsl.parity import parity

    module: Any = ttmdsl.load(layer, **consts)
    pieces = []

    class Watched(module._Schedule):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any, **more: Any) -> None:
            arguments = ("token", *arguments[1:])
            super().__init__(*arguments, **more)
            if len(self.steps[1]) > 1:
                pieces.append(self.piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_before_token", lambda s: module._STATES // (room * s.N * module._SEGMENT))
        patch.setattr(module, "_schedule", Watched)
        shapes = [Shape(**shape) for shape in SHAPES]
        rows = parity(module, dtypes=(torch.float32,), shapes=shapes, backends=("triton",))
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok], pieces


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("layer", beyond(LAYERS, "titans", "trellis"))
def test_gradients_are_the_same(layer: str, room: int, interpreter: ProcessPoolExecutor) -> None:
    missed, pieces = interpreter.submit(misses, layer, LAYERS[layer], room).result()
    assert missed == []
    assert set(pieces) == {room}


def test_states_are_found_beside_the_walk_over_the_piece_before(interpreter: ProcessPoolExecutor) -> None:
    """On a GPU, where each piece's states are found in the room of those of the last but one."""
    assert interpreter.submit(queued, 1).result() == ["main: again", "main: walk"]  # one piece, one stream
    started = interpreter.submit(queued, 4).result()
    piece = ["main: again", "side waits for main", "side: walk"]
    third, fourth = ([f"main waits for walk {i}", "main pauses", *piece] for i in range(2))  # so that walk i + 1 starts
    assert started == [*piece, *piece, *third, *fourth, "main waits for walk 3"]


def queued(pieces: int) -> list[str]:
    """What the backward pass of so many pieces queues on a GPU's streams; in the other process, which has none."""
    import torch

    module: Any = ttmdsl.load("lattice_dec")
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.events = name, 0

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: int) -> None:
            said.append(f"{self.name} waits for walk {event}")

        def record_event(self) -> int:
            self.events += 1
            return self.events - 1

    class Schedule(SimpleNamespace):
        def launch(self, kernel: Any, pointers: Any, keep: bool) -> None:
            said.append(f"{current[-1].name}: {'again' if 'again' in kernel.name else 'walk'}")

    main, side = Stream("main"), Stream("side")
    current = [main]
    nothing: dict[str, None] = defaultdict(lambda: None)
    s = Schedule(device=torch.device("cuda"), N=1, piece=1, steps=([], range(pieces)))
    s.shape, s.apart = (lambda *_: ()), (lambda _: nothing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_INTERPRET", False)
        patch.setattr(module, "_side", lambda main: side)
        patch.setattr(module, "_in_place", lambda *_: nothing)
        patch.setattr(module, "_rooms", lambda *_: {})
        patch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
        patch.setattr(torch.cuda, "set_stream", current.append)
        pause = SimpleNamespace(zero_=lambda: said.append(f"{current[-1].name} pauses"))
        patch.setattr(torch, "empty", lambda *_, **__: pause)
        module._token_launch_backward(s, *[nothing] * 9)
    assert current[-1] is main
    return said


def test_a_gpu_is_filled_and_memory_is_not(interpreter: ProcessPoolExecutor) -> None:
    for heads, tokens in ((1, 64), (16, 2048), (2048, 4096), (16, 500_000)):
        piece, room = interpreter.submit(room_of, heads, tokens).result()
        assert piece == 1 or room <= 2**28
        assert piece == -(-tokens // 16) or 2 * room > 2**28


def room_of(heads: int, tokens: int) -> tuple[int, int]:
    """Segments of a piece of exact Lattice at head size 64, and the bytes of their states; in the other process."""
    import torch

    module: Any = ttmdsl.load("lattice_dec")
    s = module._Schedule("token", (0, tokens), (0,), heads, (("d", 64), ("m", 64)), torch.float32, torch.device("cpu"))
    return s.piece, s.piece * 16 * heads * 64 * 64 * 4
