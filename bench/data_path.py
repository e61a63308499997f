"""How fast one rank gets its data, in multiples of gpt2's speed: `python bench/data_path.py`.

The standard library's text, T 1024. Memory-mapped: micro-batches of 16 and 32 from a token file of bytes and from one
of GPT-2's vocabulary. Streamed by two workers: bytes, and a byte-level BPE of GPT-2's size, made here from a part of
the same text, as its own files are not in this repository; left out if the package `tokenizers` is missing.

The unit is 547,000 tokens/s, one H200 with gpt2. A rate is that of the process that is busiest, the rank or a worker,
by the CPU's time that it used: what it would be with a core for each. Beside it the rate by the clock, which other
programs on the machine make less, and who limits.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.data import open_stream
from hpc_gpt.trainer.tokens.run_data import ensure_data
from hpc_gpt.trainer.tokens.samples import open_samples
from hpc_gpt.trainer.tokens.token_file import write_tokens

GPT2_TOKENS_S = 547_000
GOALS = {"mapped": 20.0, "streamed": 2.0}
SECONDS = 2.0
SEQ, VOCAB, WORKERS = 1024, 50257, 2
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def settings(micro_batch: int, data: Data) -> Resolved:
    return resolve(
        Experiment(
            model=Model(hidden=32, layers=1, heads=4, vocab=VOCAB, seq=SEQ),
            data=data,
            layout=LayoutRequest(gpus=1, micro_batch=micro_batch, micro_batches=4),
            train=Train(steps=10**9, dtype="fp32"),
        ),
        load_profile("local"),
    )


def measure(name: str, kind: str, resolved: Resolved) -> None:
    ensure_data(resolved)
    stream = open_stream(open_samples(resolved), resolved, 0, torch.device("cpu"))
    for step in range(2):
        list(stream.step(step))
    workers = [reader.pid for reader in _readers(stream)]
    cpus: list[Callable[[], float]] = [time.process_time, *(lambda pid=pid: _cpu_s(pid) for pid in workers)]  # type: ignore[misc]
    before, began, tokens, step = [cpu() for cpu in cpus], time.perf_counter(), 0, 1
    while time.perf_counter() < began + SECONDS:
        step += 1
        tokens += sum(batch.numel() for batch, _ in stream.step(step))
    took = time.perf_counter() - began
    used = [cpu() - one for cpu, one in zip(cpus, before, strict=True)]
    if hasattr(stream, "close"):
        stream.close()
    busiest = used.index(max(used))
    rate, clocked = tokens / max(used) / GPT2_TOKENS_S, tokens / took / GPT2_TOKENS_S
    limit = "" if not workers else f", limited by {'the rank' if not busiest else 'the workers'}"
    print(
        f"{kind}, {name}: {rate:.1f} x (goal {GOALS[kind]:g} x){limit}; by the clock {clocked:.1f} x; "
        f"{tokens / 1e6:.1f} M tokens, CPU s of the rank {used[0]:.2f}"
        + (f", of each worker {', '.join(f'{one:.2f}' for one in used[1:])}" if workers else ""),
        flush=True,
    )


def _readers(stream: Any) -> Iterable[Any]:
    return getattr(getattr(stream, "_stream", None), "_readers", ())


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def gpt2_like_tokens(folder: Path) -> Path:
    """A token file of GPT-2's vocabulary, of no meaning: 32 million tokens, 64 MB."""
    path = folder / "gpt2.tokens"
    generator = np.random.default_rng(1)
    write_tokens(path, VOCAB, "byte", (generator.integers(VOCAB, size=1 << 22, dtype=np.uint16) for _ in range(8)))
    return path


def gpt2_like_tokenizer(folder: Path) -> Path | None:
    """A byte-level BPE of up to GPT-2's size, from 200 files of the standard library."""
    try:
        import tokenizers
    except ImportError:
        return None
    texts = [path.read_text("utf-8", errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:200]]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCAB, show_progress=False, special_tokens=["<|endoftext|>"])
    path = folder / "tokenizer.json"
    bpe.save(str(path))
    return path


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = str(gpt2_like_tokens(Path(folder)))
        for micro_batch in (16, 32):
            measure(f"bytes, micro-batch {micro_batch}", "mapped", settings(micro_batch, Data()))
            file = Data(source="tokens", path=made)
            measure(f"GPT-2's vocabulary, micro-batch {micro_batch}", "mapped", settings(micro_batch, file))
        tokenizers = {"bytes": "byte"}
        if own := gpt2_like_tokenizer(Path(folder)):
            tokenizers["byte-level BPE"] = str(own)
        else:
            print("streamed, BPE: not measured, the package tokenizers is missing")
        for name, tokenizer in tokenizers.items():
            data = Data(source="stream", path="stdlib", workers=WORKERS, tokenizer=tokenizer)
            measure(f"{name}, {WORKERS} workers", "streamed", settings(16, data))


if __name__ == "__main__":
    main()
