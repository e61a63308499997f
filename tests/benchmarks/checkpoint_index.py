"""The index of a checkpoint of many ranks: `python -m tests.benchmarks.checkpoint_index [RANKS [TP]]`.

No ranks are started. A GPT of 405B parameters (Llama 3.1's sizes) is shared as engine fsdp does it, by default over
16,384 ranks at tp 8. Printed are the bytes that rank 0 receives in the first save, the seconds and memory that it needs
to make the index, the index's bytes and runs, and the seconds and memory of a rank that parses it and finds its own
runs.
"""

import json
import resource
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.weights.names import size_of
from hpc_gpt.trainer.checkpoints.states import FORMAT, INDEX, Key, SavedStates, Share, index_of, show_index
from hpc_gpt.trainer.model.tensor_parallel import Split

SHAPE = preset("llama3.1-405b")
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def split_of(name: str) -> Split | None:
    if "qkv" in name:
        return Split(0, (16384, 1024, 1024))
    if "projection" in name or "down" in name:
        return Split(1)
    return Split(0, 2 if "up" in name else 1) if not name.split(".")[-2].startswith("norm") else None


def shares_of(rank: int, ranks: int, tp: int) -> list[Share]:
    """What a rank of fsdp holds."""
    shares = []
    for name in SHAPE.parameter_names:
        shape, split = size_of(SHAPE, name), split_of(name)
        rows = shape[0] // (tp if split and split.dim == 0 else 1)
        width = int(np.prod(shape[1:])) // (tp if split and split.dim else 1)
        each = -(-rows // (ranks // tp))
        low, high = (min(rows, (rank // tp + more) * each) for more in (0, 1))
        shares.append(Share(name, shape, split, rank % tp, tp, low * width, (high - low) * width, shape[0]))
    return shares


def rss() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(ranks: int = 16384, tp: int = 8) -> None:
    keys: dict[Key, int] = {}
    tables, received = [], 0
    for rank in range(ranks):
        rows, offset = [], 0
        for kind in KINDS:
            for share in shares_of(rank, ranks, tp):
                if share.split is None and share.tp_rank:
                    continue
                split = None if share.is_by_rows or share.split is None else tuple(share.split.stored())
                key = keys.setdefault(Key(share.name, kind, "float32", share.shape, split, False), len(keys))
                for first, begin, count in share.places():
                    rows.append((key, offset + 4 * begin, 0 if split is None else share.tp_rank, first, count))
                offset += -(-4 * share.count // 64) * 64
        table = np.array(rows, np.int64)
        received += len(zlib.compress(table.tobytes(), 1))
        tables.append(np.column_stack([table, np.full(len(table), rank)]))
    before, began = rss(), time.perf_counter()
    parameters = index_of(list(keys), np.concatenate(tables))
    text = show_index({"format": FORMAT, "settings": {"layout.tp": tp}}, parameters)
    made_s = time.perf_counter() - began
    pieces = sum(map(len, tables))
    runs = sum(len(kind["runs"]) for entry in parameters.values() for kind in entry["kinds"].values())
    print(f"{SHAPE.params / 1e9:.0f}B on {ranks:,} ranks, tp {tp}: {pieces:,} runs in {runs:,} entries")
    print(
        f"rank 0 receives {received / 1e6:,.0f} MB; the index takes {made_s:.1f} s and {rss() - before:,.0f} MiB there"
    )
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / INDEX).write_text(text)
        began = time.perf_counter()
        json.loads(text)
        parsed_s = time.perf_counter() - began
        began = time.perf_counter()
        saved = SavedStates(Path(name))
        found = 0
        for share in shares_of(ranks - 1, ranks, tp):
            for kind in KINDS:
                found += sum(1 for first, _, count in share.places()
                             for _ in saved.pieces(share.name, kind, 0 if share.is_by_rows else share.tp_rank, first,
                                                   first + count))  # fmt: skip
        seconds = time.perf_counter() - began
        print(f"it has {len(text) / 1e6:.2f} MB and is parsed in {parsed_s:.3f} s")
        print(f"a rank opens it and finds its {found:,} pieces in {seconds:.3f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
