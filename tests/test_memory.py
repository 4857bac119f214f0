"""What passes hold in memory at most, beside their inputs: a backward pass as much as fla's does, a forward pass alone
nothing for a backward one."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ttmdsl
from ttmdsl.bench.subjects import Case, tensors
from ttmdsl.interpreted import rounded

CASE = Case("", (1, 2048, 1, 64), device="cpu")
MEASURED = (8, 2048, 16, 64)  # the same with a batch and heads that fill a GPU
SHARE = 8 * 16
ROWS = json.loads((Path(__file__).parent.parent / "benchmarks/results/h200.json").read_text())["rows"]
FLA = {r["layer"]: r["peak"] for r in ROWS if r["who"] == "fla" and tuple(r["shape"]) == MEASURED}  # MiB


class Held(TorchDispatchMode):
    """Counts the bytes of tensors made since, while any of them is alive, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[int] = Counter()
        self.bytes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(found):
            if isinstance(t, torch.Tensor):
                self.hold(t, known)
        return found

    def hold(self, t: torch.Tensor, known: set[int]) -> None:
        storage = t.untyped_storage()
        if storage._cdata in known and storage._cdata not in self.bytes:
            return  # a part of what was there before
        self.bytes.setdefault(storage._cdata, storage.nbytes())
        self.tensors[storage._cdata] += 1
        weakref.finalize(t, self.drop, storage._cdata)
        self.most = max(self.most, sum(self.bytes.values()))

    def drop(self, storage: int) -> None:
        self.tensors[storage] -= 1
        if not self.tensors[storage]:
            del self.bytes[storage]


def nothing(*_: Any) -> None:
    """In place of a launch: a mock would keep its arguments."""


def peak(name: str) -> int:
    """Bytes; no kernel runs."""
    module = ttmdsl.load(name)
    x = tensors(module, CASE)
    cotangent = torch.zeros_like(x["v"])
    smaller = {limit: getattr(module, limit) // SHARE for limit in ("_LARGE", "_LIGHT")}
    with (
        mock.patch.object(module._Schedule, "start", nothing),
        mock.patch.multiple(module, **smaller, _above_zero=lambda t: False),
        rounded(),  # as on a GPU, where kernels take bfloat16
        Held() as held,
    ):
        y, _ = module.op(**x, backend="triton")
        kept = y, torch.autograd.grad(y, list(x.values()), cotangent, allow_unused=True)
        assert kept
    return held.most


@pytest.mark.parametrize("name", FLA)
def test_a_backward_pass_holds_no_more_than_flas(name: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(peak, name).result() * SHARE / 2**20 <= FLA[name]


def rooms(name: str) -> tuple[dict[str, bool], dict[str, bool]]:
    """For each value that forward kernels pass on whether it has room: where a backward pass may follow, and where not.
    No kernel runs."""
    module = ttmdsl.load(name)
    x, (forward, backward) = tensors(module, CASE), module._LAUNCH["chunk"]
    found: list[dict[str, bool]] = []

    def launch(*arguments: Any) -> Any:
        saved = arguments[6]
        found.append({key: t is not None for key, t in saved.items()})
        return forward(*arguments)

    with (
        mock.patch.dict(module._LAUNCH, chunk=(launch, backward)),
        mock.patch.object(module._Schedule, "start", nothing),
    ):
        module.op(**x, backend="triton")
        with torch.no_grad():
            module.op(**x, backend="triton")
    recorded, alone = found
    return recorded, alone


@pytest.mark.parametrize("name", ["abc", "gated_delta_net", "gsa", "rwkv7", "trellis"])
def test_a_forward_pass_alone_holds_what_it_takes_itself(name: str, interpreter: ProcessPoolExecutor) -> None:
    recorded, alone = interpreter.submit(rooms, name).result()
    assert recorded.keys() == alone.keys()
    assert all(recorded.values())
    assert not all(alone.values())
    assert any(alone.values()) == (name != "abc")  # whose one scan takes nothing of a kernel before it
