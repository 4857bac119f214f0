"""What kernels spill: values that ptxas mixes up, in nvdisasm's text, and what only looks like it; more warps."""

from __future__ import annotations

from typing import Any

import pytest

from ttmdsl.machine_code import Either, MixUp, mix_ups

# of dplr's third gradient map in heads of 60 by four warps, ptxas 12.8: R182 held the thread's number, is let go for a
# logarithm that was spilled, and read again as the thread's number
LET_GO = """
        /*0010*/                   FFMA R205, R38.reuse, -0.5, R3 ;
        /*0020*/                   S2R R182, SR_TID.X ;
        /*0030*/                   STL [R1+0x1f0], R205 ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   LOP3.LUT R181, R182, 0x60, RZ, 0xc0, !PT ;
        /*0060*/                   LDL.LU R182, [R1+0x1f0] ;
        /*0070*/                   LOP3.LUT R228, R182, 0x1c, RZ, 0xc0, !PT ;
        /*0080*/                   MUFU.EX2 R25, R182 ;
.L_x_2:
        /*0090*/                   EXIT ;
"""


def test_a_value_read_where_another_lies() -> None:
    (found,) = mix_ups(LET_GO)
    assert isinstance(found, MixUp)
    assert (found.found, found.whole) == (
        "FFMA R205, R38.reuse, -0.5, R3 ;",
        "LOP3.LUT R228, R182, 0x1c, RZ, 0xc0, !PT ;",
    )
    assert found.real == "MUFU.EX2 R25, R182 ;"
    assert all(part in str(found) for part in (found.found, found.whole, found.real))


@pytest.mark.parametrize("line", ["LOP3.LUT R228, R182, 0x1c", "MUFU.EX2 R25, R182"])
def test_without_one_of_its_lines_nothing_is_mixed_up(line: str) -> None:
    lines = LET_GO.splitlines()
    assert mix_ups("\n".join(text for text in lines if line not in text)) == []


# of delta_product's gradient map in heads of 64, in blocks of 32: a product takes a tile from before the walk, and
# after the first block what another product has loaded
TAKEN = """
        F2FP.BF16.F32.PACK_AB R176, R59, R58 ;
        F2FP.BF16.F32.PACK_AB R177, R61, R60 ;
        F2FP.BF16.F32.PACK_AB R178, R63, R62 ;
        F2FP.BF16.F32.PACK_AB R179, R65, R64 ;
.L_x_1:
        HGMMA.64x32x16.F32.BF16 R72, R176, gdesc[UR40].tnspB, R72 ;
        LDSM.16.MT88.4 R176, [R3+UR4+0x2800] ;
        HGMMA.64x32x16.F32.BF16 R40, R176, gdesc[UR44].tnspB, RZ, !UPT, gsb0 ;
        @P0 BRA `(.L_x_1) ;
        EXIT ;
"""


def test_an_operand_that_is_either_of_two() -> None:
    (found,) = mix_ups(TAKEN)
    assert found == Either(
        "HGMMA.64x32x16.F32.BF16 R72, R176, gdesc[UR40].tnspB, R72 ;",
        "F2FP.BF16.F32.PACK_AB R176, R59, R58 ;",
        "LDSM.16.MT88.4 R176, [R3+UR4+0x2800] ;",
    )
    assert all(part in str(found) for part in ("R72, R176", "R59, R58", "R3+UR4"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LDSM.16.MT88.4 R176", "LDSM.16.MT88.4 R180"),  # it has registers of its own
        ("R40, R176, gdesc[UR44]", "R40, gdesc[UR40], gdesc[UR44]"),  # ... of no product: that is another's anyway
        ("@P0 BRA `(.L_x_1) ;", ""),  # there is no second block
        ("R72, R176, gdesc[UR40]", "R72, gdesc[UR36], gdesc[UR40]"),  # it lies in shared memory
    ],
)
def test_what_is_one_operand(before: str, after: str) -> None:
    text = TAKEN.replace(before, after)
    assert text != TAKEN
    assert bool(mix_ups(text)) == ("UR44" in before)


@pytest.mark.parametrize(("place", "number"), [("R176", 1), ("R178", 0), ("R177", 0)])
def test_either_operand_of_a_product_before_hopper(place: str, number: int) -> None:
    for operands in (f"{place}, R8", f"R8, {place}"):
        text = TAKEN.replace(
            "HGMMA.64x32x16.F32.BF16 R72, R176, gdesc[UR40].tnspB, R72", f"HMMA.16816.F32.BF16 R72, {operands}, R72"
        )
        text = text.replace("LDSM.16.MT88.4 R176", "LDSM.16.M88 R176")
        assert len(mix_ups(text)) == number


def test_an_operand_that_was_spilled() -> None:
    """By way of the stack, where a loop puts what it has loaded."""
    spilled = TAKEN.replace(".L_x_1:", "STL.128 [R1+0x8], R176 ;\n.L_x_1:\nLDL.128 R176, [R1+0x8] ;\n")
    assert not mix_ups(spilled)
    assert len(mix_ups(spilled.replace("@P0", "STL.128 [R1+0x8], R176 ;\n@P0"))) == 1


@pytest.mark.parametrize(
    ("instructions", "number"),
    [
        # addresses, by way of shared memory's and of tensors in global memory; a part of a vector
        ("FADD R4, R5, R6 ; FMUL R8, R4, R4 ; LDS R7, [R4+0x400] ;", 1),
        ("FADD R4, R5, R6 ; FMUL R8, R4, R4 ; STG.E desc[UR4][R4.64], R8 ;", 1),
        ("LDS.128 R4, [R9] ; FMUL R8, R6, R6 ; SHF.R.U32.HI R7, RZ, 0x5, R6 ;", 1),
        ("LDS.128 R4, [R9] ; FMUL R8, R6, R6 ; SHF.R.U32.HI R7, RZ, 0x5, R7 ;", 0),
        ("LDSM.16.M88.4 R4, [R9] ; FMUL R8, R7, R7 ; LDS R3, [R7] ;", 1),
        ("LDSM.16.M88 R4, [R9] ; FMUL R8, R5, R5 ; LDS R3, [R5] ;", 0),
        # copies are what they copy; what is found anew is not what was there
        ("FADD R4, R5, R6 ; MOV R7, R4 ; FMUL R8, R4, R4 ; LDS R3, [R7] ;", 1),
        ("FADD R4, R5, R6 ; FMUL R8, R4, R4 ; IADD3 R4, R1, R2, RZ ; LDS R3, [R4] ;", 0),
        ("HGMMA.64x64x8.F32.TF32 R24, R84, gdesc[UR8], RZ, !UPT ; FMUL R8, R55, R55 ; LDS R3, [R56] ;", 0),
        ("HGMMA.64x64x8.F32.TF32 R24, R84, gdesc[UR8], RZ, !UPT ; FMUL R8, R55, R55 ; LDS R3, [R55] ;", 1),
        # a zero is both; a half's bits are shifted to a float's; an exponent is taken out of a float
        ("MOV R4, RZ ; FMUL R8, R4, R4 ; LDS R3, [R4] ;", 0),
        ("IMAD.MOV.U32 R4, RZ, RZ, RZ ; FMUL R8, R4, R4 ; LOP3.LUT R3, R4, 0x1c, RZ, 0xc0, !PT ;", 0),
        ("FADD R4, R5, R6 ; FMUL R8, R4, R4 ; IMAD.U32 R9, R4, 0x10000, RZ ;", 0),
        ("FADD R4, R5, R6 ; FMUL R8, R4, R4 ; SHF.R.U32.HI R7, RZ, 0x17, R4 ;", 0),
        ("FADD R4, R5, R6 ; FMUL R8, R4, R4 ; LOP3.LUT R7, R4, 0x7fffff, RZ, 0xc0, !PT ;", 0),
        # a function leaves its result where it will
        ("IADD3 R4, R5, R6, RZ ; LDS R3, [R4] ; CALL.REL.NOINC `(.L_x_9) ; FMNMX R8, R4, R3, !PT ;", 0),
        # a load that some threads leave out, whose register held something else
        ("IADD3 R4, R5, R6, RZ ; LDS R3, [R4] ; @!P4 LDS R4, [R9] ; FMNMX R8, R4, R3, !PT ;", 0),
        ("IADD3 R4, R5, R6, RZ ; LDS R3, [R4] ; FMNMX R8, R4, R3, !PT ;", 1),
    ],
)
def test_what_is_one_value(instructions: str, number: int) -> None:
    assert len(mix_ups(instructions.replace("; ", ";\n"))) == number


def test_a_value_that_comes_by_one_of_two_ways() -> None:
    before = "S2R R4, SR_TID.X ;\n@P0 BRA `(.L_x_1) ;\n"
    after = ".L_x_1:\nLDS R3, [R4] ;\nEXIT ;"
    assert mix_ups(before + "FADD R4, R5, R6 ;\nFMUL R5, R4, R4 ;\n" + after)
    assert not mix_ups(before + "FADD R4, R5, R6 ;\nFMUL R5, R4, R4 ;\nBRA `(.L_x_2) ;\n" + after + "\n.L_x_2:\nEXIT ;")


def warps_where_registers_are_spilled() -> dict[int, Any]:
    """The warps of a map by head size."""
    import torch

    import ttmdsl

    module = ttmdsl.load("dplr")
    found = {}
    for size in (60, 64):
        sizes = {"d_k": size, "d_v": size}
        _, options = next(module.kernel_launches("_chunk_backward_1_3_kernel", sizes, torch.bfloat16, 90))
        found[size] = options["num_warps"]
    return found


def test_more_warps_where_masks_have_registers_spilled(interpreter: Any) -> None:
    # as it was measured in heads of 64
    assert interpreter.submit(warps_where_registers_are_spilled).result() == {60: (4, 8, 600), 64: 4}


def what_is_started(spilled: int | None) -> tuple[list[int], list[int]]:
    """The warps by which a kernel is compiled and started that spills so many bytes by four, and few by eight.

    None: it finds no room by four.
    """
    from types import SimpleNamespace
    from unittest import mock

    import torch

    import ttmdsl

    module = ttmdsl.load("dplr")
    compiled: list[int] = []
    started: list[int] = []

    def warmup(*_: object, grid: object, num_warps: int) -> SimpleNamespace:
        compiled.append(num_warps)
        loaded = {} if spilled is None else {"n_spills": spilled // 4 if num_warps == 4 else 2}
        return SimpleNamespace(run=None, **loaded)

    kernel = SimpleNamespace(jit=SimpleNamespace(warmup=warmup))
    starts = module._Starts(torch.device("cpu"))

    def start(*about: Any) -> None:
        if spilled is None and about[-1]["num_warps"] == 4:
            raise module.triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        started.append(about[-1]["num_warps"])

    starts.start = start
    ways = [((1,), {}, {"num_warps": warps}) for warps in ((4, 8, 600), 2)]
    with mock.patch.object(module, "_COMPILES", True):
        way = starts.fit("known", kernel, (), (), iter(ways))
    assert way[2]["num_warps"] == started[0]
    return compiled, started


def test_a_kernel_that_spills_is_not_started(interpreter: Any) -> None:
    assert interpreter.submit(what_is_started, 784).result() == ([4], [8])
    assert interpreter.submit(what_is_started, 584).result() == ([4], [4])
    assert interpreter.submit(what_is_started, None).result() == ([4], [2])
