"""The Triton body in Triton's interpreter against the reference in fp64, and its kernels compiled for a real GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from alone import run_alone
from triton_cases import Case, Row, check

from thinkfold.errors import UnsupportedError

# Few and small: the interpreter takes tens of milliseconds a program. It multiplies no bfloat16 matrices, and loses
# the carry where a number is rounded up to a power of 2 in fp8: the seeds of fp8 cases are such that none is.
# test_triton_gpu.py has no such limits.
CASES = [
    (
        Case(1, 3, 16, 16, (Row(1, 40), Row(2, 9), Row(1, 300), Row(0, 9), Row(1, 16)), sinks=(4, -1, 0)),
        torch.float32,
        0,
    ),
    (Case(2, 1, 12, 8, (Row(1, 30, (5, 0)), Row(1, 8), Row(1, 9, (8, 17))), beta=True, sinks=(1,)), torch.float32, 0),
    (Case(1, 2, 8, 8, (Row(1, 9), Row(3, 20))), torch.float32, 0),
    (Case(1, 4, 16, 8, (Row(1, 70, (20,)), Row(9, 13)), window=5), torch.float16, 0),
    (Case(1, 2, 32, 32, (Row(1, 33, (40,)), Row(1, 5)), beta=True, fp8=True), torch.float32, 2),
    (Case(1, 17, 16, 64, (Row(3, 66),), fp8=True), torch.float32, 4),
    (Case(1, 2, 24, 16, (Row(1, 33, (40,)), Row(1, 5)), beta=True, fp8=True), torch.float16, 0),
    (Case(2, 3, 12, 8, (Row(1, 30, (16, 0)), Row(2, 9, (8, 40)), Row(1, 9)), beta=True, int4=True), torch.float32, 0),
    (Case(1, 2, 74, 16, (Row(1, 40, (80,)),), int4=True), torch.float16, 0),
    # Decode tiles, whose queries are columns: of two rows at least, next to two tokens of padding.
    (Case(1, 3, 16, 8, (Row(1, 33, (40,)), Row(1, 5)), fp8=True), torch.float16, 1),
    (Case(1, 9, 32, 64, (Row(1, 70), Row(0, 5), Row(2, 70), Row(0, 3)), window=33, fp8=True), torch.float16, 18),
    (Case(1, 2, 16, 16, (Row(1, 40, (80,)), Row(1, 7)), beta=True, fp8=True, int4=True), torch.float16, 0),
    (Case(1, 7, 128, 16, (Row(1, 40, (304,)), Row(1, 3)), beta=True, int4=True), torch.float16, 0),
    (Case(1, 9, 76, 64, (Row(1, 40, (320,)), Row(2, 9), Row(0, 1)), int4=True), torch.float16, 0),
    (Case(1, 1, 8, 64, (Row(1, 4_160, (9,)), Row(1, 3)), sinks=(0,)), torch.float32, 0),  # more splits than one chunk
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


def test_interpreted_kernels_match_the_reference() -> None:
    pytest.importorskip("triton")
    assert run_alone(__file__, "interpret", "1").split() == [str(i) for i in range(len(CASES))]


def test_an_unknown_dtype_is_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="float64"):
        check(CASES[0][0], torch.float64, "cpu", 0.0)


def test_the_body_is_chosen_by_the_device() -> None:
    pytest.importorskip("triton")
    from thinkfold.runner.loader import (
        pick_attention,
    )  # and transformers, which the programs of this file can do without

    assert pick_attention("auto", torch.device("cpu")) == pick_attention("reference", torch.device("cuda"))
    assert pick_attention("auto", torch.device("cuda")) == pick_attention("triton", torch.device("cuda")) == "triton"
    with pytest.raises(UnsupportedError, match="attention_backend: triton needs a GPU"):
        pick_attention("triton", torch.device("cpu"))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """The interpreter takes what the compiler refuses: masks that are no booleans, casts between sizes."""
    pytest.importorskip("triton")
    kernels = run_alone(__file__, "compile", "0").split()
    assert kernels == ["store", "merge", "merge", "store", *["attend_splits"] * 7]


def compile_kernel(kernel: Any, types: str, ints: str, constants: dict[str, object]) -> None:
    """Down to machine code of an H100; `types` are those of the arguments that are no ints and no constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = dict.fromkeys(ints.split(), "i32") | dict.fromkeys(constants, "constexpr")
    named = iter(types.split())
    signature = {name: known.get(name) or next(named) for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, values, aligned)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 3})
    assert done.asm["cubin"]
    print(kernel.fn.__name__, flush=True)


def compile_kernels() -> None:
    """Every kernel, and what stores fp8 also without it."""
    from thinkfold.attention.triton_merge import merge
    from thinkfold.attention.triton_splits import attend_splits
    from thinkfold.attention.triton_store import store

    sizes = {"NUM_LAYERS": 2, "NUM_HEADS": 2, "HEAD_DIM": 64, "PAGE_SIZE": 16}
    tile = {"GROUP": 3, "BLOCK_M": 16, "BLOCK_N": 32}
    ints = "k_stride v_stride num_tokens num_tiles num_rows layer"
    tables = "*i32 *i32 *i64 *i32 *i32 *fp32 *fp32 fp32"
    more = "table_width num_lines summary_width layer window first_split raw_splits num_splits beta"
    compile_kernel(
        store, "*bf16 *bf16 *bf16 *fp16 *i64 *i32 *i32 *i32", ints, {**sizes, "TILE_TOKENS": 4, "FP8": False}
    )
    for chunk in (16, 64):
        compile_kernel(
            merge,
            "*bf16 *fp32 *fp32 *i32 *i64 *bf16 *fp32 *bf16 *fp32",
            "num_tokens num_rows num_sunk num_splits layer",
            {"NUM_HEADS": 6, "HEAD_DIM": 64, "CHUNK": chunk},
        )
    compile_kernel(
        store, "*fp16 *fp16 *fp8e4nv *fp16 *i64 *i32 *i32 *i32", ints, {**sizes, "TILE_TOKENS": 4, "FP8": True}
    )
    wide: dict[str, object] = {**sizes, **tile, "LANES": 64, "INT4": 0, "RAW": True, "SUMMARIES": True}
    wide["COLUMNS"] = 0
    small = {**wide, "HEAD_DIM": 8, "LANES": 16, "FP8": False}
    compile_kernel(attend_splits, f"*bf16 *fp8e4nv *fp16 *fp32 {tables}", more, {**wide, "FP8": True})
    compile_kernel(attend_splits, f"*fp32 *fp32 *fp16 *fp32 {tables}", more, small)
    compile_kernel(attend_splits, f"*fp16 *fp8e4nv *fp16 *fp32 {tables}", more, {**small, "FP8": True})
    compile_kernel(attend_splits, f"*bf16 *bf16 *fp16 *fp32 {tables}", more, {**wide, "FP8": False, "INT4": 1})
    compile_kernel(attend_splits, f"*bf16 *fp8e4nv *fp16 *fp32 {tables}", more, {**wide, "FP8": True, "INT4": 1})
    columns: dict[str, object] = {**wide, "BLOCK_M": 8, "FP8": True, "COLUMNS": 2}
    compile_kernel(attend_splits, f"*bf16 *fp8e4nv *fp16 *fp32 {tables}", more, columns)
    compile_kernel(attend_splits, f"*bf16 *fp8e4nv *fp16 *fp32 {tables}", more, {**columns, "INT4": 1})


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_kernels()
    else:
        for number, (case, dtype, seed) in enumerate(CASES):
            check(case, dtype, "cpu", TOLERANCE[dtype], seed)
            print(number, flush=True)
