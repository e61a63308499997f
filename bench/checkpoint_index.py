"""The index of a checkpoint of many ranks: `python -m bench.checkpoint_index [RANKS [TP]]`.

No ranks are started. A GPT of 405B parameters (Llama 3.1's sizes) is shared as engine fsdp does it, by default over
16,384 ranks at tp 8. Printed are the bytes that rank 0 receives in the first save, the seconds and memory that it needs
to make the index, the index's bytes and runs, and the seconds and memory of a rank that parses it and finds its own
runs.
"""

import json
import math
import resource
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

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


def table_of(ranks: int, tp: int) -> tuple[dict[Key, int], np.ndarray[Any, Any]]:
    """The keys, and a row for each run of each rank, as rank 0 receives them."""
    keys, tables = dict[Key, int](), list[np.ndarray[Any, Any]]()
    numbers = np.arange(ranks)
    tp_rank, dp_rank, offset = numbers % tp, numbers // tp, np.zeros(ranks, np.int64)
    for kind in KINDS:
        for share in shares_of(0, ranks, tp):
            split, shape = share.split, share.shape
            width = math.prod(shape[1:]) // (tp if split and split.dim else 1)
            rows = shape[0] // (tp if split and split.dim == 0 else 1)
            each = -(-rows // (ranks // tp))
            first, end = (np.minimum(rows, (dp_rank + more) * each) * width for more in (0, 1))
            stored = None if share.is_by_rows or split is None else tuple(split.stored())
            key = keys.setdefault(Key(share.name, kind, "float32", shape, stored, False), len(keys))
            for one in range(tp if split else 1):
                at = 0
                by_rows = split is not None and split.dim == 0
                ranges = split.ranges(shape[0], one, tp) if split and by_rows else [(0, rows)]
                for begin, length in ranges:
                    low, high = np.maximum(first, at), np.minimum(end, at + length * width)
                    mine = (tp_rank == one) & (low < high)
                    place = (low + begin * width - at, low - first, high - low)
                    columns = (offset + 4 * place[1], np.full(ranks, one if stored else 0), place[0], place[2], numbers)
                    tables.append(np.column_stack([np.full(ranks, key), *columns])[mine])
                    at += length * width
            offset += -(-4 * (end - first) // 64) * 64 * ((tp_rank == 0) | (split is not None))
    return keys, np.concatenate(tables)


def main(ranks: int = 16384, tp: int = 8) -> None:
    keys, table = table_of(ranks, tp)
    received = sum(len(zlib.compress(table[table[:, 5] == rank][:, :5].tobytes(), 1)) for rank in range(0, ranks, 256))
    received, pieces = received * 256, len(table)
    before, began = rss(), time.process_time()
    parameters = index_of(list(keys), table)
    text = show_index({"format": FORMAT, "settings": {"layout.tp": tp}}, parameters)
    made_s = time.process_time() - began
    runs = sum(len(kind["runs"]) for entry in parameters.values() for kind in entry["kinds"].values())
    print(f"{SHAPE.params / 1e9:.0f}B on {ranks:,} ranks, tp {tp}: {pieces:,} runs in {runs:,} entries")
    print(f"rank 0 receives about {received / 1e6:,.0f} MB in its first save")
    print(f"it makes the index in {made_s:.1f} s of CPU, with {rss() - before:,.0f} MiB")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / INDEX).write_text(text)
        began = time.process_time()
        json.loads(text)
        parsed_s = time.process_time() - began
        began = time.process_time()
        saved = SavedStates(Path(name))
        found = 0
        for share in shares_of(ranks - 1, ranks, tp):
            for kind in KINDS:
                found += sum(1 for first, _, count in share.places()
                             for _ in saved.pieces(share.name, kind, 0 if share.is_by_rows else share.tp_rank, first,
                                                   first + count))  # fmt: skip
        seconds = time.process_time() - began
        print(f"the index has {len(text) / 1e6:.2f} MB and is parsed in {parsed_s:.3f} s of CPU")
        print(f"a rank opens it and finds its {found:,} pieces in {seconds:.3f} s of CPU")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
