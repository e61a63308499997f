"""The trial of grouped products (`grouped_trial`) on this machine's device: python -m bench.gpu.trial

Prints a line for each dtype and matrix of qwen3-30b-a3b's experts and of the widest ones: the verdict, seconds, and the
peak of the device's memory as a share of all.
"""

import time

import torch

from hpc_gpt.trainer.engines.grouped_trial import difference
from hpc_gpt.trainer.model.experts import why_not_grouped

WIDTHS = ((1536, 2048), (2048, 768), (32768, 6144))


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for outputs, inputs in WIDTHS:
            began = time.perf_counter()
            why = why_not_grouped(device, dtype, outputs, inputs)
            verdict = why or difference(device, dtype, outputs, inputs) or "equal to the loop"
            took, share = time.perf_counter() - began, 0.0
            if is_gpu:
                share = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(device).total_memory
                torch.cuda.reset_peak_memory_stats()
            print(f"{dtype} {outputs} x {inputs}: {verdict}; {took:.3f} s, {share:.2%} of the memory", flush=True)


if __name__ == "__main__":
    main()
