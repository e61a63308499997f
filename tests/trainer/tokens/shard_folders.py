"""Folders of shards whose every sample tells where it comes from, and the settings to stream them."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard

from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.resolved import Resolved

SEQ = 4
LOCAL = ClusterProfile(name="local", scheduler="local", gpus_per_node=64, gpu_flag="none", chain="none")
KINDS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst")


def write_shards(folder: Path, sizes: Sequence[int]) -> Path:
    """Shards of so many samples of SEQ + 1 bytes, of every kind in turn; sample 258 of shard 3 begins with `3102`."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        # One byte more for the last sample's target: the document's end.
        text = "".join(f"{number:x}{sample:03x}" for sample in range(size))
        write_shard(folder / f"{number:02d}{KINDS[number % len(KINDS)]}", text)
    return folder


def write_shard(path: Path, text: str) -> None:
    """A text as one document, of the kind that the path's suffixes say."""
    content = f"{json.dumps({'text': text})}\n".encode() if ".jsonl" in path.name else text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)


def streaming(path: Path, dp: int = 1, workers: int = 0, train: dict[str, Any] | None = None, **data: Any) -> Resolved:
    """A run that streams `path`."""
    return reading("stream", path, dp=dp, train=train, workers=workers, **data)


def reading(
    source: str, path: Path | str, vocab: int = 256, dp: int = 1, train: dict[str, Any] | None = None, **data: Any
) -> Resolved:
    """A run that reads data of any kind; none is kept for evaluation unless `data` says so."""
    experiment = Experiment(
        name="small",
        model=Model(hidden=32, layers=1, heads=4, vocab=vocab, seq=SEQ),
        data=Data(source=source, path=str(path), **{"eval_fraction": 0.0, **data}),  # type: ignore[arg-type]
        layout=LayoutRequest(gpus=dp, tp=1, dp=dp, micro_batch=2, micro_batches=2),
        train=Train(**{"dtype": "fp32", "seed": 5, **(train or {})}),
    )
    return resolve(experiment, LOCAL)
