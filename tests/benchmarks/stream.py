"""Tokens a second that one rank gets from a stream: `python tests/benchmarks/stream.py [WORKERS [SEQ [TOKENIZER]]]`.

Streams the standard library's shards (text and jsonl, plain and by gzip) into micro-batches of 8 for six seconds, on a
CPU, with nothing that trains. Beside the rate it prints the CPU seconds the rank itself used: a rate that the readers
limit leaves it idle.
"""

from __future__ import annotations

import sys
import time

import torch

from hpc_gpt.settings.cluster import load_profile
from hpc_gpt.settings.experiment import Data, Experiment, LayoutRequest, Model, Train
from hpc_gpt.settings.resolve import resolve
from hpc_gpt.tokens.run_data import ensure_data, open_samples
from hpc_gpt.train.data import open_stream

SECONDS = 6.0


def main(workers: int = 2, seq: int = 1024, tokenizer: str = "byte") -> None:
    torch.set_num_threads(1)
    experiment = Experiment(
        model=Model(hidden=32, layers=1, heads=4, vocab=1 << 18, seq=seq),
        data=Data(source="stream", path="stdlib", workers=workers, tokenizer=tokenizer),
        layout=LayoutRequest(gpus=1, micro_batch=8, micro_batches=4),
        train=Train(steps=10**9, dtype="fp32"),
    )
    resolved = resolve(experiment, load_profile("local"))
    ensure_data(resolved)
    stream = open_stream(open_samples(resolved), resolved, 0, torch.device("cpu"))
    asked = time.perf_counter()
    list(stream.step(0))
    began, cpu_s, tokens, step = time.perf_counter(), time.process_time(), 0, 0
    while (taken_s := time.perf_counter() - began) < SECONDS:
        step += 1
        tokens += sum(batch.numel() for batch, _ in stream.step(step))
    cpu_s = time.process_time() - cpu_s
    print(
        f"{workers} workers, seq {seq}, {tokenizer}: {tokens / taken_s / 1e6:.2f} M tokens/s; the rank used "
        f"{cpu_s:.1f} s of CPU in {taken_s:.1f} s; the first step was there after {began - asked:.1f} s"
    )
    stream.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((int, int, str), sys.argv[1:], strict=False)))  # type: ignore[arg-type]
