"""Compiles the Triton kernels for an H100 or H200 (sm_90), which needs no GPU.

Prints how each reads and writes, and how many of its programs fit on a multiprocessor.

python -m tests.trainer.model.sm90  one JSON object: {kernel: {"16-byte loads": 4, "registers": 58, "programs": 2, ...}}
"""

import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.trainer.model.triton_worker import find_triton

_ACCESS = re.compile(r"\b(ld|st)\.global\S*?(\.v\d)?\.b(\d+)\s")
# A load ahead, from global to shared memory: its size is the third operand.
_AHEAD = re.compile(r"\bcp\.async\.\w+\.shared\.global\S* \[[^\]]*\], \[[^\]]*\], (0x\w+|\d+)")
# A multiprocessor of sm_90: registers, threads, bytes of shared memory, of which each program takes 1 KiB more.
_REGISTERS, _THREADS, _SHARED, _RESERVED = 65536, 2048, 228 << 10, 1 << 10


def compiled(kernel: Any, arguments: dict[str, str], how: dict[str, int]) -> dict[str, int]:
    """Loads and stores of global memory in the kernel's PTX, by size, and what a program takes. Pointers and counts are
    multiples of 16. `how`: its constants and options."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in how.items() if name in kernel.arg_names}
    names, warps = kernel.arg_names, how["num_warps"]
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if arguments.get(name, "")[:1] in "*i"}
    source = ASTSource(
        kernel,
        {name: arguments.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    found = Counter[str]()
    for kind, vector, bits in _ACCESS.findall(built.asm["ptx"]):
        size = int(bits) // 8 * int(vector[2:] or 1)
        found[f"{size}-byte {'loads' if kind == 'ld' else 'stores'}"] += 1
    for size in _AHEAD.findall(built.asm["ptx"]):
        found["loads ahead"] += 1
        found[f"{int(size, 0)}-byte loads"] += 1
    registers, stack, shared = usage(built)
    # Registers are given out to a warp, by 256.
    of_program = warps * -(-registers * 32 // 256) * 256
    programs = min(_REGISTERS // of_program, _THREADS // (32 * warps), _SHARED // (shared + _RESERVED))
    taken = {"registers": registers, "stack": stack, "threads": 32 * warps, "programs": programs}
    return {**found, **taken}


def usage(built: Any) -> tuple[int, int, int]:
    """(registers of a thread, bytes of its stack, shared bytes of a program), as the assembler has decided."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        said = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))
    return registers, stack, built.metadata.shared


def main() -> None:
    find_triton()
    from hpc_gpt.trainer.model import triton_kernels

    # GPT-2's vocabulary, padded; split in two.
    whole = {"REAL": 50257, "ROWS": 50304, **triton_kernels._LOSS}
    half = {"REAL": 25105, "ROWS": 25152, **triton_kernels._LOSS}
    # Qwen's.
    wide = {"REAL": 151_669, "ROWS": 151_936, **triton_kernels._LOSS}
    losses = {"targets": "*i64", "losses": "*fp32", "slope": "fp32"}
    rows = {"logits": "*bf16", "index": "*i64", "tops": "*fp32", "totals": "*fp32"}
    print(
        json.dumps(
            {
                "whole": compiled(triton_kernels._whole, {"logits": "*bf16", **losses}, whole | {"WRITES": True}),
                "whole fp32": compiled(triton_kernels._whole, {"logits": "*fp32", **losses}, whole | {"WRITES": True}),
                "evaluated": compiled(triton_kernels._whole, {"logits": "*bf16", **losses}, whole | {"WRITES": False}),
                "statistics": compiled(triton_kernels._statistics, rows | {"hits": "*fp32"}, half),
                "gradients": compiled(triton_kernels._gradients, rows | {"slope": "fp32"}, half),
                "wide": compiled(triton_kernels._whole, {"logits": "*bf16", **losses}, wide | {"WRITES": True}),
                "multiply": compiled(
                    triton_kernels._multiply,
                    {"values": "*bf16", "factor": "*fp32", "products": "*bf16", "COUNT": "i32"},
                    {"BLOCK": 4096, "num_warps": 8},
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
