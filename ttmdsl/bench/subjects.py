"""What is timed: this package's backends and the peers of a layer, each as functions that do the same work.

Input: a `Case`. Output: `Subject`s over the same tensors: unit q and k, decays near 1, gates in their ranges. A memory
whose size no tensor tells, such as an MLP's inner one, is four times as wide as a head, as `Layer` makes it; its gates
from 0 to 1 are near 0.01, since greater steps let it diverge. A decode step goes on from what one token left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ttmdsl.aot import parse_variant
from ttmdsl.bench.peers import Block, Peer, peers_of
from ttmdsl.drawing import dims_at, in_range, is_deep, kept_exact, sizes_of

DECODED = 64  # sequences that a decode step goes on with


@dataclass(frozen=True, slots=True)
class Case:
    """A variant of a layer, such as "trellis:b=64", at B, T, H, D; `dtype` is that of the inputs."""

    layer: str
    shape: tuple[int, int, int, int]
    dtype: str = "bfloat16"
    device: str = "cuda"
    backend: str = "auto"

    def load(self) -> Any:
        """The layer's module."""
        from ttmdsl.loader import load

        name, consts = parse_variant(self.layer)
        return load(name, **consts)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Subject:
    """One way to compute a case: y of whole sequences, the tensors that get gradients, and one token's step.

    `same`: whether y is that of `op`.
    """

    who: str
    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    step: Callable[[], Callable[[], object]] | None = None
    same: bool = True

    def both(self) -> Callable[[], object]:
        """Forward and backward, by a cotangent drawn once."""
        cotangent = torch.randn_like(self.forward())
        return lambda: torch.autograd.grad(self.forward(), self.leaves, cotangent, allow_unused=True)

    def only_forward(self) -> Callable[[], object]:
        def run() -> Tensor:
            with torch.no_grad():
                return self.forward()

        return run


# ---- tensors ------------------------------------------------------------------------------------------------


def tensors(module: Any, case: Case, lead: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """`op`'s tensors, ready for gradients; `lead` replaces [B, T, H], as for a step."""
    B, T, H, D = case.shape
    sizes = sizes_of(module, dims_at(module, D))
    generator = torch.Generator(case.device).manual_seed(0)
    found, deep = {}, is_deep(module)
    for name, axes in {**module.INPUTS, **module.GATES, **module.PARAMS}.items():
        shape = (*((H,) if name in module.PARAMS else lead or (B, T, H)), *(sizes[axis] for axis in axes))
        t = torch.randn(shape, generator=generator, device=case.device)
        if name in module.INPUTS and axes and name != "v":
            t = F.normalize(t, dim=-1)
        if deep and module.RANGES[name] == "unit":
            t = t - 7  # a rate at which memories of several layers do not enlarge rounding
        t = in_range(t, module.RANGES[name])
        found[name] = (t if kept_exact(module, name) else t.to(case.torch_dtype)).requires_grad_()
    return found


def initial_state(module: Any, case: Case) -> dict[str, Tensor] | None:
    """Memories whose sizes no tensor tells, or None."""
    if not is_deep(module):
        return None
    sizes = sizes_of(module, dims_at(module, case.shape[3]))
    generator = torch.Generator(case.device).manual_seed(1)

    def memory(rows: int, columns: int) -> Tensor:
        shape = (1, case.shape[2], rows, columns)
        return torch.randn(shape, generator=generator, device=case.device) / math.sqrt(columns)

    return {name: memory(*(sizes[axis] for axis in axes)) for name, axes in module.MEMORY.items()}


# ---- subjects -----------------------------------------------------------------------------------------------


def own(case: Case, module: Any, backend: str) -> Subject:
    """One of this package's backends."""
    x, state = tensors(module, case), initial_state(module, case)

    def forward() -> Tensor:
        y: Tensor = module.op(**x, initial_state=state, backend=backend)[0]
        return y

    def step() -> Callable[[], object]:
        token = {k: t.detach() for k, t in tensors(module, case, (DECODED, case.shape[2])).items()}
        _, past = module.step(**token, initial_state=state, backend=backend)

        def run() -> object:
            with torch.no_grad():
                return module.step(**token, initial_state=past, backend=backend)

        return run

    return Subject(f"ttmdsl {backend}", forward, list(x.values()), step)


def compiled(case: Case, module: Any) -> Subject:
    """The torch backend under torch.compile."""
    plain = own(case, module, "torch")
    return Subject("torch.compile", torch.compile(plain.forward), plain.leaves)


def peer(case: Case, module: Any, found: Peer) -> Subject:
    """Another package's function over the same tensors."""
    x = tensors(module, case)

    def step() -> Callable[[], object]:
        token = {k: t.detach() for k, t in tensors(module, case, (DECODED, 1, case.shape[2])).items()}
        return found.token(token)

    return Subject(found.who, found.sequence(x), list(x.values()), step)


def block(case: Case, who: str, make: Callable[[], Any]) -> Subject:
    """A whole block of a model, [B, T, hidden] to the same: projections, norms and gates included."""
    B, T, H, D = case.shape
    x = torch.randn(B, T, H * D, device=case.device).to(case.torch_dtype).requires_grad_()
    made = make().to(device=case.device, dtype=case.torch_dtype)
    return Subject(who, lambda: made(x)[0], [x, *made.parameters()], same=False)


def others(
    case: Case, module: Any, with_peers: bool, with_compiled: bool
) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """All that a case can be held against here, and what makes it: on a GPU the peers that are installed, elsewhere the
    reference; and torch.compile."""
    if with_peers and case.device != "cuda":
        yield "ttmdsl reference", lambda: own(case, module, "reference")
    elif with_peers:
        yield from _peers(case, module)
    if with_compiled:
        yield "torch.compile", lambda: compiled(case, module)


def _peers(case: Case, module: Any) -> Iterator[tuple[str, Callable[[], Subject]]]:
    _, _, H, D = case.shape
    found = peers_of(parse_variant(case.layer)[0])
    yield from ((p.who, functools.partial(peer, case, module, p)) for p in found if isinstance(p, Peer))
    blocks = [p for p in found if isinstance(p, Block)]
    ours = functools.partial(module.Layer, hidden_size=H * D, num_heads=H)
    group = int(module.CONSTS.get("b", 64))
    theirs = [(p.who, functools.partial(p.build, H, D, group)) for p in blocks]
    for who, make in [("ttmdsl Layer", ours), *theirs] if blocks else []:
        yield who, functools.partial(block, case, who, make)
