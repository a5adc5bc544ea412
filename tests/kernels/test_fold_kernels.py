"""The kernels of a fold against their PyTorch twins: interpreted, and on a GPU; and compiled for one that is absent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from alone import run_alone
from fold_cases import CASES, Case, Memory, check, check_alone, check_broken, check_nothing, check_ties

LARGE = [
    Case(4, 7, 128, 16, 32, 900, 1040, entries=32),
    Case(8, 4, 128, 16, 64, 5000, 5256, entries=64, ends=(300, 700, 1020)),
    Case(8, 4, 128, 16, 64, 5000, 5256, entries=64, fp8=True),
    Case(2, 8, 128, 64, 40, 5000, 5256, entries=640, weights=(0.2, 1.9, 1.4, 0.5)),
]


def test_interpreted_kernels_fold_as_their_twins() -> None:
    pytest.importorskip("triton")
    assert run_alone(__file__, "interpret", "1").split() == ["float32", "float16", "ties", "broken", "alone", "nothing"]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    pytest.importorskip("triton")
    assert run_alone(__file__, "compile", "0").split() == [*["look", "score", "squares", "write"] * 3, "choose"]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_no_fold_waits_for_a_compiler_once_its_kernels_are_made() -> None:
    pytest.importorskip("triton")
    assert run_alone(__file__, "specialise", "0").split() == ["1"] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGPU:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
    def test_folds_as_their_twins(self, case: Case, dtype: torch.dtype) -> None:
        check(case, dtype, "cuda")

    def test_ties_nans_and_neighbours(self) -> None:
        check_ties("cuda")
        check_broken("cuda")
        check_alone("cuda")
        check_nothing("cuda")


def interpret() -> None:
    for name, cases in (("float32", CASES), ("float16", CASES[1:3])):  # the interpreter cannot multiply bfloat16
        for case in cases:
            check(case, getattr(torch, name), "cpu")
        print(name, flush=True)
    for one in (check_ties, check_broken, check_alone, check_nothing):
        one("cpu")
        print(one.__name__.removeprefix("check_"), flush=True)


def compile_all() -> None:
    from test_triton_paged import compile_kernel

    from thinkfold.runner.triton_choose import choose
    from thinkfold.runner.triton_fold_gate import squares
    from thinkfold.runner.triton_fold_write import write
    from thinkfold.runner.triton_importance import look, score

    for query, kv, raw in (("bf16", "bf16", "bf16"), ("bf16", "fp8e4nv", "u8"), ("fp32", "fp32", "fp32")):
        size = {"HEAD_DIM": 128, "LANES": 128, "PAGE_SIZE": 16, "FP8": kv == "fp8e4nv"}
        tile = {"BLOCK_M": 16, "BLOCK_N": 32} if query == "fp32" else {"BLOCK_M": 64, "BLOCK_N": 64}
        heads, small = {"HEADS": 4, "GROUP": 7}, {**tile, "BLOCK_N": 32}
        compile_kernel(
            look,
            f"*{query} *i64 *i64 *fp32 *{kv} *fp16 *i64 *{query} *fp32 fp32",
            "tokens num_rows num_lines num_heads",
            {**size, **tile, **heads, "HALF": 64},
        )
        compile_kernel(
            score,
            f"*{query} *fp32 *{kv} *fp16 *i64 *i64 *fp32 fp32",
            "tokens num_rows num_lines num_heads num_ends conclusion",
            {**size, **tile},
        )
        compile_kernel(
            squares,
            f"*{query} *fp32 *i64 *u8 *{kv} *fp16 *i64 *i64 *i64 *fp32 fp32",
            "tokens width num_rows num_lines num_heads",
            {**size, **small, **heads},
        )
        compile_kernel(
            write,
            f"*{raw} *fp16 *fp32 *i64 *i64 *i64 *i64 *i32",
            "slot width num_slots room num_heads with_bias",
            {**size, "BLOCK_N": 16, "HEADS": 4},
        )
    compile_kernel(choose, "*fp32 *i64 *i64", "tokens width", {"LANES": 1024})


class Variants:
    """Stands for a kernel and counts how often it would be compiled for an H100."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime.jit import create_function_from_signature

        backend = CUDABackend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.seen: set[str] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: self.seen.add(str(self.bind(*args, **options)[1:]))


def specialise() -> None:
    names = ("_look", "_score", "_choose", "_squares", "_write")
    known: dict[str, Variants] = {}
    for pages, computed, entries in ((1, 61, 16), (3, 90, 8), (5, 99, 16), (5, 300, 24)):
        case = CASES[0]._replace(pages=pages, computed=computed, entries=entries)
        memory = Memory.of(case, torch.bfloat16, "cpu")
        memory.tables.reserve()
        folder = memory.folder("triton")
        for name in names:
            kernel = known.setdefault(name, Variants(getattr(folder._kernels, name)))
            setattr(folder._kernels, name, kernel)
        folder.make_kernels()
        folder.prepare(memory.prepare(), None)
        folder.commit(memory.commit(folder._prepared[7].counts))
    for name in names:
        print(len(known[name].seen), flush=True)


if __name__ == "__main__":
    {"compile": compile_all, "specialise": specialise, "interpret": interpret}[sys.argv[1]]()
