"""Launches of compiled kernels: the second of its kind goes past Triton's look-up, with the same arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

import ttmdsl
from ttmdsl.drawing import Shape, draw


class Kernel:
    """A kernel, and what Triton makes of it, which runs nothing and keeps what it was called with, by name."""

    def __init__(self, name: str, arguments: list[str], compiles: bool = True) -> None:
        self.name, self.arg_names, self.compiles = name, arguments, compiles
        self.jit = self
        self.looked_up: list[dict[str, Any]] = []
        self.direct: list[dict[str, Any]] = []

    def start(self, grid: tuple[int, ...], *positional: Any, **named: Any) -> Any:
        bound = dict(zip(self.arg_names, positional, strict=False)) | named
        self.looked_up.append({"grid": grid, **{n: bound[n] for n in self.arg_names}})
        return Compiled(self) if self.compiles else None


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, stream: int) -> None:
            named = dict(zip(self.kernel.arg_names, arguments, strict=True))
            self.kernel.direct.append({"grid": grid[:2], "stream": stream, **named})

        return run


def schedule() -> Any:
    module = ttmdsl.load("gated_delta_net")
    sizes = tuple({"d_k": 16, "d_v": 16}.items())
    return module._Schedule("chunk", (0, 128), (0,), 2, sizes, torch.bfloat16, torch.device("cpu"))


NAMES = ["k_ptr", "beta_ptr", "offset_ptr", "bounds_ptr", "unit_bounds_ptr", "sequence_ptr"]
CONSTANTS = [
    "H",
    "N_d_k",
    "P_d_k",
    "BT",
    "LEN",
    "GROUP",
    "PER",
    "DOT",
    "PRECISION",
    "INVERSE",
    "BY_WARP",
    "DIMS_FIRST",
    "KEEP",
    "EVEN",
    "SEGMENT",
]


def kernel(compiles: bool = True) -> Kernel:
    return Kernel("_chunk_forward_free_kernel", NAMES + CONSTANTS, compiles)


def pointers(dtype: torch.dtype = torch.bfloat16, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, dtype=dtype)[skip:], torch.zeros(4)


def launched(*many: tuple[torch.Tensor, ...], keep: tuple[bool, ...] = (), compiles: bool = True) -> Kernel:
    """What becomes of a kernel that is launched with these pointers, one after the other."""
    found, place = kernel(compiles), schedule()
    with mock.patch.object(ttmdsl.load("gated_delta_net"), "_stream", return_value=7):
        for i, each in enumerate(many):
            place.launch(found, each, keep=not keep or keep[i])
    return found


def second_has_the_arguments_of_the_first() -> None:
    again = pointers()
    found = launched(pointers(), again)
    (first,), (second,) = found.looked_up, found.direct
    assert [second[n] for n in NAMES[:2]] == [t.data_ptr() for t in again]
    assert [second[n] for n in NAMES[2:]] == [first[n].data_ptr() for n in NAMES[2:]]
    assert [second[n] for n in ("grid", *CONSTANTS)] == [first[n] for n in ("grid", *CONSTANTS)]
    assert first["grid"] == (2 * 2, 1)  # units, heads
    assert second["stream"] == 7


def other_dtypes_and_addresses_are_looked_up() -> None:
    for other in (pointers(torch.float32), pointers(skip=1)):
        found = launched(pointers(), other)
        assert len(found.looked_up) == 2
        assert not found.direct


def what_is_kept_or_not_is_another_kernel() -> None:
    found = launched(pointers(), pointers(), pointers(), keep=(True, False, False))
    assert [call["KEEP"] for call in found.looked_up] == [True, False]
    assert [call["KEEP"] for call in found.direct] == [False]


def what_is_interpreted_is_never_launched_directly() -> None:
    found = launched(pointers(), pointers(), pointers(), compiles=False)
    assert len(found.looked_up) == 3
    assert not found.direct


def small_tensors_lie_together() -> None:
    place, made = schedule(), []

    def shapes() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        made.append(1)
        return {"a": ((3, 5), torch.bfloat16), "b": ((), torch.float32), "c": ((2, 7), torch.float32)}

    def large() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"d": ((2**27,), torch.bfloat16), "e": ((4,), torch.bfloat16)}

    for _ in range(2):
        first, second = place.together("small", shapes, lambda: {"f": ((9,), torch.bfloat16)})
        found = {**first, **second}
        assert {k: (tuple(t.shape), t.dtype) for k, t in found.items()} == {**shapes(), "f": ((9,), torch.bfloat16)}
        assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 1
        for i, t in enumerate(found.values()):
            assert t.is_contiguous()
            assert t.data_ptr() % 16 == 0
            t.fill_(i)
        assert all((t == i).all() for i, t in enumerate(found.values()))  # no two overlap
    assert len(made) == 3  # once for the schedule, twice for the test
    (found,) = place.together("large", large)
    assert not found  # each is made when it is asked for
    assert [tuple(found[k].shape) for k in "ede"] == [(4,), (2**27,), (4,)]
    assert found["e"] is found["e"]
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 2


def gradients_of_large_tensors_are_those_of_small_ones() -> None:
    """Whose kernels ask for them one by one, in another order than `op` takes them."""
    for layer in ("gated_delta_net", "retnet"):
        module = ttmdsl.load(layer)
        x = {key: t.float() for key, t in draw(module, Shape("", tokens=70, dims=(16,), state=False)).x.items()}
        found = []
        for large in (module._LARGE, 0):
            leaves = {key: t.clone().requires_grad_() for key, t in x.items()}
            with mock.patch.object(module, "_LARGE", large):
                module._schedule.cache_clear()
                y, _ = module.op(**leaves, backend="triton")
                found.append(torch.autograd.grad(y.square().sum(), list(leaves.values())))
        torch.testing.assert_close(*found)
        module._schedule.cache_clear()


def states_are_kept_only_where_a_backward_pass_may_follow() -> None:
    module = ttmdsl.load("gated_delta_net")
    drawn = draw(module, Shape("", tokens=70, dims=(16,), state=False))
    x = {key: t.float().requires_grad_() for key, t in drawn.x.items()}
    with mock.patch.object(module._Schedule, "launch", autospec=True) as launch:
        module.op(**x, backend="triton")
        with torch.no_grad():
            module.op(**x, backend="triton")
        module.op(**{key: t.detach() for key, t in x.items()}, backend="triton")
    kept = [call.args[3] for call in launch.call_args_list]
    assert kept == [True] * 2 + [False] * 4  # the inverse, and the scan


def absent(module: Any, use: Callable[[torch.Tensor, dict[str, torch.Tensor] | None], Any], **how: Any) -> set[str]:
    """Pointers that kernels get no tensor for, forward and backward of what is used of the results."""
    x = {key: t.float().requires_grad_() for key, t in draw(module, Shape("", tokens=70, dims=(16,))).x.items()}
    found: set[str] = set()

    def launch(place: Any, kernel: Any, pointers: tuple[torch.Tensor | None, ...], keep: bool) -> None:
        names = module.KERNEL_POINTERS[kernel.name]
        found.update(name for name, t in zip(names, pointers, strict=True) if t is None)

    with mock.patch.object(module._Schedule, "launch", launch):
        use(*module.op(**x, backend="triton", **how)).sum().backward()
    return found


def what_a_backward_pass_is_done_with_is_freed() -> None:
    module = ttmdsl.load("gla")
    x = {key: t.float().requires_grad_() for key, t in draw(module, Shape("", tokens=70, dims=(16,))).x.items()}
    seen: list[dict[str, weakref.ref[torch.Tensor]]] = []
    alive: list[set[str]] = []

    def launch(place: Any, kernel: Any, pointers: tuple[torch.Tensor | None, ...], keep: bool) -> None:
        names = module.KERNEL_POINTERS[kernel.name]
        alive.append({name for each in seen for name, t in each.items() if t() is not None})
        given = {name: t for name, t in zip(names, pointers, strict=True) if name.endswith("_saved_ptr")}
        seen.append({name: weakref.ref(t) for name, t in given.items() if t is not None})

    with mock.patch.object(module._Schedule, "launch", launch):
        y, _ = module.op(**x, backend="triton")
        torch.autograd.grad(y.sum(), [*x.values()], retain_graph=True)
        (scan,) = (i for i, name in enumerate(module.KERNEL_POINTERS) if name == "_chunk_backward_scan_kernel")
        walked = set(seen[scan])
        assert walked
        assert walked <= alive[scan + 1]  # which another backward pass may take
        count = len(seen) - scan
        torch.autograd.grad(y.sum(), [*x.values()])
        assert not walked & alive[-count + 1]


def states_that_nobody_gives_or_asks_for_are_absent() -> None:
    module = ttmdsl.load("gated_delta_net")
    S = torch.zeros(1, 1, 16, 16)
    alone = absent(module, lambda y, _: y)
    assert alone == {"S_start_ptr", "S_end_ptr", "d_S_start_ptr", "d_S_end_ptr"}
    unused = absent(module, lambda y, _: y, initial_state={"S": S}, output_final_state=True)
    assert unused == {"d_S_start_ptr", "d_S_end_ptr"}
    used = absent(module, lambda _, end: end["S"], initial_state={"S": S.requires_grad_()}, output_final_state=True)
    assert used == set()
    assert "S_start_ptr" not in absent(ttmdsl.load("ttt_norm"), lambda y, _: y)  # orthonormal columns


def small_heads_take_float32() -> None:
    module = ttmdsl.load("gated_delta_net")
    constants = "DOT", "PRECISION", "INVERSE", "P_d_k"

    def taken(kernel: str, size: int, dtype: torch.dtype = torch.bfloat16, other: int = 0) -> tuple[str, ...]:
        found = next(module.kernel_launches(kernel, {"d_k": size, "d_v": other or size}, dtype, 90))[0]
        return tuple(str(found[key]) for key in constants)

    forward, backward = "_chunk_forward_scan_kernel", "_chunk_backward_scan_kernel"
    assert taken(forward, 8) == taken(backward, 16) == ("fp32", "ieee", "tf32", "16")
    assert taken(forward, 17) == taken(forward, 32) == ("fp32", "tf32", "tf32", "64")  # scans alone
    assert taken(forward, 33) == taken(backward, 17) == taken(forward, 16, other=64) == ("bf16", "tf32", "tf32", "64")
    assert taken(forward, 64, torch.float32)[:3] == taken(forward, 16, torch.float32)[:3] == ("fp32", "ieee", "ieee")


def what_passes_between_kernels_of_small_heads() -> None:
    module = ttmdsl.load("gated_delta_net")

    def passed(size: int, tokens: int) -> tuple[set[torch.dtype], set[torch.dtype]]:
        """Dtypes of what is saved, and of the states at units' starts."""
        sizes = {"d_k": size, "d_v": 4}
        s = module._Schedule("chunk", (0, tokens), (0,), 2, sizes, torch.bfloat16, torch.device("cpu"))
        rooms, units = module._rooms(s, 1, module._SAVED["chunk"]), module._units(s, 1, module._KEPT["chunk"])
        return {held for _, held in rooms.values()}, {held for _, held in units.values()}

    half, full = torch.bfloat16, torch.float32
    assert passed(16, 9) == ({full}, {full})
    assert passed(20, 9) == ({half, full}, {full})
    # 4 MiB of states, each of 80 numbers a head
    units = 2**22 // (4 * 80 * 2)
    assert passed(20, 64 * units) == ({half, full}, {full})
    assert passed(20, 64 * (units + 1)) == ({half, full}, {half})


def narrow_blocks_of_light_states_are_not_as_measured() -> None:
    module = ttmdsl.load("gated_delta_net")
    asked = []

    def measured(*_: object, narrow: bool, **__: object) -> dict[str, int]:
        asked.append(narrow)
        return {}

    with mock.patch.object(module, "_measured", measured):
        for size, light in ((64, False), (64, True), (60, False)):
            sizes = {"d_k": size, "d_v": size}
            next(module._choices("_chunk_backward_1_kernel", sizes, "chunk", torch.bfloat16, 64, 64, 90, light=light))
    assert asked == [True, False, False]


def many_heads_of_small_states_are_stepped_by_a_warp_each() -> None:
    def warps(
        layer: str, lanes: int, kernel: str = "_token_forward_kernel", size: int = 64, step: bool = False
    ) -> object:
        module = ttmdsl.load(layer)
        sizes = dict.fromkeys(module._KERNELS[kernel][2], size)
        _, options = next(module._choices(kernel, sizes, "token", torch.bfloat16, 32, lanes, 90, step=step))
        return options["num_warps"]

    assert [warps("gated_delta_net", lanes) for lanes in (16, 128, 1024)] == [4, 4, 1]
    assert warps("gsa", 1024) == 4  # two states, which one warp would spill
    assert warps("gated_delta_net", 1024, "_token_backward_kernel") > 1
    assert [warps(layer, 128, "_token_again_kernel") for layer in ("lattice_dec", "mesa")] == [2, 4]
    assert [warps("mesa", lanes, step=True) for lanes in (16, 1024)] == [4, 2]
    assert [warps(layer, 1024, size=128, step=True) for layer in ("mesa", "gsa")] == [8, 8]
    assert [warps(layer, 1024, size=64, step=True) for layer in ("mesa", "trellis")] == [2, 4]


def a_step_splits_states_whose_columns_are_independent() -> None:
    def taken(layer: str, d_k: int, d_v: int = 64) -> tuple[object, object]:
        module = ttmdsl.load(layer)
        sizes = {"d_k": d_k, "d_v": d_v}
        constants, options = next(module.kernel_launches("_token_forward_kernel", sizes, torch.bfloat16, 90, step=True))
        return constants["P_d_v"], options["num_warps"]

    assert [taken("gated_delta_net", d_k) for d_k in (60, 128, 256, 512)] == [(16, 2), (16, 2), (16, 4), (16, 8)]
    assert [taken("omega_linear", 64, d_v) for d_v in (8, 128)] == [(16, 2), (16, 2)]
    assert [taken("delta_product", d_k) for d_k in (64, 128, 256)] == [(16, 1), (16, 1), (16, 4)]
    assert taken("mesa", 64) == (64, 4)  # a sum over its columns comes between


def a_step_of_many_values_takes_narrow_blocks_of_the_inner_dim_in_wide_heads() -> None:
    def taken(layer: str, head: int) -> tuple[object, object]:
        module = ttmdsl.load(layer)
        constants, options = next(
            module.kernel_launches("_token_step_kernel", {"d": head, "h": 4 * head}, torch.bfloat16, 90, step=True)
        )
        return constants["P_h"], options["num_warps"]

    assert [taken(layer, head) for layer in ("titans", "omega_net") for head in (64, 128)] == [(64, 4)] * 3 + [(32, 4)]


def states_are_copied_ahead_beside_few_tiles_alone() -> None:
    module = ttmdsl.load("lattice_dec")

    def stages(size: int) -> tuple[object, object]:
        sizes = {"d": size, "m": size}
        constants, options = next(module.kernel_launches("_token_backward_kernel", sizes, torch.bfloat16, 90))
        return constants["STAGES"], options["num_stages"]

    assert [stages(size) for size in (64, 128)] == [(3, 3), (1, 1)]


def scans_copy_all_ahead_but_where_less_was_measured_faster() -> None:
    module = ttmdsl.load("gsa")

    def stages(kernel: str, size: int) -> tuple[object, object]:
        sizes = dict.fromkeys(("d_k", "d_v", "m"), size)
        constants, options = next(module.kernel_launches(kernel, sizes, torch.bfloat16, 90))
        assert "copied" not in options
        return constants.get("STAGES", "none of its own"), options["num_stages"]

    assert stages("_chunk_forward_scan_1_kernel", 64) == (3, 3)
    assert stages("_chunk_forward_scan_1_kernel", 128) == (None, 3)  # as the tables have it
    assert stages("_token_forward_kernel", 64)[0] == "none of its own"  # what walks over tokens loads ahead itself
    kernel, sizes = "_chunk_forward_scan_1_kernel", dict.fromkeys(("d_k", "d_v", "m"), 32)
    tried = module._choices(kernel, sizes, "chunk", torch.bfloat16, 64, 128, 0)
    ways = [(constants["STAGES"], options["num_stages"]) for constants, options in tried]
    assert ways[:4] == [(3, 3), (None, 3), (2, 2), (None, 2)]  # where shared memory is short
    deep = ttmdsl.load("titans")
    assert not any("_scan_" in kernel for kernel in deep._STAGED)  # nor do loops around other loops


def maps_of_tokens_alone_keep_four_warps_in_heads_of_128() -> None:
    module = ttmdsl.load("gsa")
    maps = {kernel: (way, alive) for kernel, (way, alive, *_) in module._KERNELS.items() if way.startswith("map")}

    def warps(kernel: str, size: int) -> object:
        tiles = {f"{letter}_{d}": size for d in ("d_k", "d_v", "m") for letter in "NP"}
        return module._options(kernel, tiles, 64, 128)["num_warps"]

    most = module._ROOM["map"]
    for kernel, (way, alive) in maps.items():
        if alive <= most:
            states = any(value.endswith("_units_ptr") for value in module.KERNEL_POINTERS[kernel])
            assert (way == "map") >= states
            assert warps(kernel, 64) == 4
            assert warps(kernel, 128) == (8 if way == "map" and alive > most / 2 else 4)
            assert warps(kernel, 256) == 8 or alive < most / 2
    assert {way for way, _ in maps.values()} == {"map", "map of tokens"}


def walks_of_whole_states_take_eight_warps_in_heads_of_128() -> None:
    """Where a grid splits no dim, a state of 128 x 128 is in every program."""
    module = ttmdsl.load("ttt_norm")
    scans = {kernel: k for kernel, k in module._KERNELS.items() if k[0] == "scan" and kernel.startswith("_chunk_")}
    assert scans
    for kernel, (_, alive, dims, blocked, _) in scans.items():
        assert not blocked
        for size in (64, 128):
            tiles = {f"{letter}_{d}": size for d in dims for letter in "NP"}
            held = alive * (size / 64) ** 2
            assert module._options(kernel, tiles, 64, 128)["num_warps"] == (8 if held > module._ROOM["scan"] else 4)
        assert alive <= module._ROOM["scan"] < 4 * alive
    split = ttmdsl.load("gated_delta_net")
    way, alive, dims, blocked, _ = split._KERNELS["_chunk_forward_scan_kernel"]
    tiles = {f"{letter}_{d}": 64 if (letter, d) == ("P", blocked) else 128 for d in dims for letter in "NP"}
    assert blocked
    assert 2 * alive <= split._ROOM[way]
    assert split._options("_chunk_forward_scan_kernel", tiles, 64, 128)["num_warps"] == 4


def warps_by_rule_are_doubled_where_a_kernel_spills() -> None:
    """Scans of blocks of wide heads, on Hopper, in units of 64 tokens; maps."""

    def warps(module: Any, head: int, gpu: int = 90, kernel: str = "_chunk_forward_scan_kernel") -> object:
        launches = module.kernel_launches(kernel, dict.fromkeys(("d_k", "d_v", "m"), head), torch.bfloat16, gpu)
        return next(launches)[1]["num_warps"]

    swla, short = ttmdsl.load("swla"), ttmdsl.load("titans_linear", b=16)
    assert warps(swla, 128) == 8  # as measured
    with mock.patch.object(swla, "_TUNED", {}), mock.patch.object(short, "_TUNED", {}):
        assert warps(swla, 128) == (4, 8, 96)
        assert warps(swla, 64) == warps(swla, 128, 80) == 4
        assert warps(short, 128) == 4
    module = ttmdsl.load("ttt_norm")  # no grid splits its states
    with mock.patch.object(module, "_TUNED", {}):
        assert warps(module, 128) == 8
    module, free = ttmdsl.load("trellis", b=16), "_chunk_backward_free_kernel"
    assert warps(module, 64, kernel=free) == 4  # as measured
    with mock.patch.object(module, "_TUNED", {}):
        assert warps(module, 64, kernel=free) == warps(module, 64, 80, free) == (2, 4, 800)
        assert warps(module, 128, kernel=free) == 8


def reverse_scans_of_short_units_take_four_warps_and_scans_three_stages() -> None:
    module = ttmdsl.load("omega_linear", b=64)
    scans = {kernel: (way, alive) for kernel, (way, alive, *_) in module._KERNELS.items() if "_scan_" in kernel}
    assert {way for way, _ in scans.values()} == {"scan", "reverse"}
    for kernel, (way, alive) in scans.items():
        for tokens in (32, 64):
            tiles = {f"{letter}_{d}": 128 for d in ("d_k", "d_v") for letter in "NP"}
            found = module._options(kernel, tiles, tokens, 128)
            short = way == "reverse" and tokens < 64
            assert found["num_warps"] == (8 if 2 * alive > module._ROOM[way] and not short else 4)
            assert found["num_stages"] == 3


def programs_that_share_out_a_dim_have_one_block_each() -> None:
    module = ttmdsl.load("trellis", b=64)
    # of 64 heads: their size, processors, programs of each head, the width of a block
    known = (128, 132, 2, 64), (128, 127, 1, 128), (192, 132, 2, 128), (192, 192, 3, 64), (64, 640, 1, 64)
    for kernel, (dim, _) in module._SHARED.items():
        for size, processors, shares, width in known:
            sizes, form = dict.fromkeys(("d_k", "m", "d_v"), size), kernel.split("_")[1]
            place = sizes, form, torch.bfloat16, 64, 64, 90
            for tiles, options in module._choices(kernel, *place, processors=processors):
                assert (tiles["SHARES"], tiles[f"P_{dim}"]) == (shares, width)
                assert shares * width >= size
                assert "shares" not in options


def eight_warps_share_products_of_crowded_maps_in_heads_of_128_on_hopper() -> None:
    def shared(module: Any, kernel: str, size: int = 128, gpu: int = 90, which: int = -1) -> object:
        """By the last of its launches all columns are there at once."""
        sizes = dict.fromkeys(("d_k", "d_v"), size)
        constants, options = [*module.kernel_launches(kernel, sizes, torch.bfloat16, gpu)][which]
        assert "dims_first" not in options
        return constants["DIMS_FIRST"]

    found = set()
    for layer in ("rwkv7", "delta_product", "gla"):
        module = ttmdsl.load(layer)
        maps = {kernel: 2 * alive for kernel, (way, alive, *_) in module._KERNELS.items() if way == "map"}
        with mock.patch.object(module, "_TUNED", {}):
            least, most = module._CROWDED
            for kernel, held in maps.items():
                assert shared(module, kernel) == (least < held <= most)
                assert not shared(module, kernel, size=64)
                assert not shared(module, kernel, gpu=80)
            assert not any(shared(module, kernel) for kernel in module._KERNELS.keys() - maps.keys())
        found |= {(held > least, held > most) for held in maps.values()}
        kernel = next(kernel for kernel in maps if kernel.startswith("_chunk_"))
        for config, expected in (({"num_warps": 8}, False), ({"num_warps": 8, "dims_first": 1}, True)):
            entries = {90: {kernel: (((64, 128, 128), 2, 128, config, "3.6.0"),)}}
            with mock.patch.object(module, "_TUNED", entries):
                assert shared(module, kernel, which=0) is expected
    assert found == {(False, False), (True, False), (True, True)}


def tangents_are_not_dropped() -> None:
    module = ttmdsl.load("delta_net")
    x = {key: t.float() for key, t in draw(module, Shape("", tokens=70, dims=(16,), state=False)).x.items()}
    with forward_ad.dual_level():
        x["v"] = forward_ad.make_dual(x["v"], torch.ones_like(x["v"]))
        with pytest.raises(NotImplementedError, match="jvp"):
            module.op(**x, backend="triton")


@pytest.mark.parametrize(
    "case",
    [
        second_has_the_arguments_of_the_first,
        other_dtypes_and_addresses_are_looked_up,
        what_is_kept_or_not_is_another_kernel,
        what_is_interpreted_is_never_launched_directly,
        small_tensors_lie_together,
        gradients_of_large_tensors_are_those_of_small_ones,
        states_are_kept_only_where_a_backward_pass_may_follow,
        what_a_backward_pass_is_done_with_is_freed,
        states_that_nobody_gives_or_asks_for_are_absent,
        small_heads_take_float32,
        what_passes_between_kernels_of_small_heads,
        narrow_blocks_of_light_states_are_not_as_measured,
        many_heads_of_small_states_are_stepped_by_a_warp_each,
        a_step_splits_states_whose_columns_are_independent,
        a_step_of_many_values_takes_narrow_blocks_of_the_inner_dim_in_wide_heads,
        states_are_copied_ahead_beside_few_tiles_alone,
        scans_copy_all_ahead_but_where_less_was_measured_faster,
        maps_of_tokens_alone_keep_four_warps_in_heads_of_128,
        walks_of_whole_states_take_eight_warps_in_heads_of_128,
        warps_by_rule_are_doubled_where_a_kernel_spills,
        reverse_scans_of_short_units_take_four_warps_and_scans_three_stages,
        programs_that_share_out_a_dim_have_one_block_each,
        eight_warps_share_products_of_crowded_maps_in_heads_of_128_on_hopper,
        tangents_are_not_dropped,
    ],
    ids=lambda case: case.__name__,
)
def test_launches(case: Callable[[], None], interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(case).result()  # where kernels are defined
