"""Compiles the Triton kernels for an H100 or H200 (sm_90), which needs no GPU, and prints how each reads and writes.

python -m tests.model.sm90      one JSON object: {kernel: {"16-byte loads": 4, ...}}
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from tests.model.triton_worker import find_triton

_ACCESS = re.compile(r"\b(ld|st)\.global\S*?(\.v\d)?\.b(\d+)\s")


def accesses(kernel: Any, arguments: dict[str, str], constants: dict[str, int], warps: int) -> dict[str, int]:
    """Loads and stores of global memory in the kernel's PTX, by size. Pointers and counts are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if arguments.get(name, "")[:1] in "*i"}
    source = ASTSource(
        kernel,
        {name: arguments.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    found = Counter[str]()
    for kind, vector, bits in _ACCESS.findall(ptx):
        size = int(bits) // 8 * int(vector[2:] or 1)
        found[f"{size}-byte {'loads' if kind == 'ld' else 'stores'}"] += 1
    return dict(found)


def main() -> None:
    find_triton()
    from hpc_gpt.model import triton_kernels

    # GPT-2's vocabulary, padded; split in two.
    whole = {"REAL": 50257, "ROWS": 50304, "BLOCK": 16384}
    half = {"REAL": 25105, "ROWS": 25152, "BLOCK": 16384}
    rows = {"tops": "*fp32", "totals": "*fp32"}
    logits = {"logits": "*bf16", "index": "*i64"}
    tile = {name: value for name, value in triton_kernels._TILE.items() if name != "num_warps"}
    summed = {"sums": "*fp32", "COUNT": "i32"}
    print(
        json.dumps(
            {
                "whole": accesses(
                    triton_kernels._whole,
                    {"logits": "*bf16", "targets": "*i64", "losses": "*fp32", "slope": "fp32"},
                    whole,
                    32,
                ),
                "statistics": accesses(triton_kernels._statistics, logits | rows | {"hits": "*fp32"}, half, 32),
                "gradients": accesses(triton_kernels._gradients, logits | rows | {"slope": "fp32"}, half, 32),
                "multiply": accesses(
                    triton_kernels._multiply,
                    {"values": "*bf16", "factor": "*fp32", "products": "*bf16", "COUNT": "i32"},
                    {"BLOCK": 4096},
                    8,
                ),
                "gelu": accesses(
                    triton_kernels._gelu_sums,
                    dict.fromkeys(("slopes", "outputs", "gradients"), "*bf16") | summed,
                    tile | {"WIDTH": 3072},
                    8,
                ),
                "join": accesses(
                    triton_kernels._join_sums,
                    dict.fromkeys(("query", "key", "value", "joined"), "*bf16")
                    | dict.fromkeys(("query_stride", "key_stride", "value_stride"), "i32")
                    | summed,
                    tile | {"WIDTH": 768},
                    8,
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
