"""Micro-batches: the same samples a step in every layout, and from any step on."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.attempt import Trainer
from hpc_gpt.trainer.data import DataStream
from hpc_gpt.trainer.model.context_parallel import SequencePart
from hpc_gpt.trainer.tokens.samples import open_samples
from tests.trainer.launch import settings


def rows(resolved: Resolved, step: int) -> list[tuple[Any, ...]]:
    """The (tokens, targets) of a step, all ranks together, sorted."""
    samples = open_samples(resolved)
    found = []
    for dp_rank in range(resolved.layout.dp):
        stream = DataStream(samples, resolved, dp_rank, torch.device("cpu"))
        for tokens, targets in stream.step(step):
            assert tokens.dtype == targets.dtype == torch.int64
            assert tokens.shape == targets.shape == (resolved.batch.micro_batch, resolved.model.seq)
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            found += [(*map(tuple, pair),) for pair in zip(tokens.tolist(), targets.tolist(), strict=True)]
    return sorted(found)


def test_no_layout_and_no_restart_changes_a_steps_samples(tokens: Path) -> None:
    one = settings(tokens, {"tp": 1, "pp": 1, "dp": 1})
    # The same global batch of 4, split otherwise.
    two = settings(tokens, {"tp": 2, "pp": 1, "dp": 1})
    four = settings(tokens, {"tp": 1, "pp": 1, "dp": 2, "micro_batch": 1})
    for step in (0, 3, 500):
        assert rows(one, step) == rows(two, step) == rows(four, step)
    assert rows(one, 0) != rows(one, 1)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_of_a_replica_have_parts_of_the_same_samples(tokens: Path, size: int, paired: bool) -> None:
    resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 2})
    samples = open_samples(resolved)
    whole = DataStream(samples, resolved, 1, torch.device("cpu"))
    parts = [SequencePart(rank, size, paired) for rank in range(size)]
    # Each position once.
    places = torch.cat([part.of(torch.arange(resolved.model.seq)) for part in parts])
    assert places.sort().values.tolist() == list(range(resolved.model.seq))
    streams = [DataStream(samples, resolved, 1, torch.device("cpu"), part) for part in parts]
    for read in (lambda stream: stream.step(3), lambda stream: stream.evaluation(1)):
        for pair, *shares in zip(read(whole), *map(read, streams), strict=True):
            for number, expected in enumerate(pair):  # tokens and targets
                for part, share in zip(parts, shares, strict=True):
                    assert torch.equal(share[number], part.of(expected, 1))


def test_evaluation_has_the_same_samples_each_time(tokens: Path) -> None:
    resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 2})
    stream = DataStream(open_samples(resolved), resolved, 1, torch.device("cpu"))
    first, again = ([pair[0].tolist() for pair in stream.evaluation(3)] for _ in range(2))
    assert (first, len(first)) == (again, 3 * resolved.batch.micro_batches)


def test_documents_go_along_with_their_micro_batch(tokens: Path) -> None:
    resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 2})
    masked = replace(resolved, data=replace(resolved.data, mask_documents=True, end_token=ord("e")))
    samples = open_samples(resolved)
    plain, marked = (DataStream(samples, one, 1, torch.device("cpu")) for one in (resolved, masked))
    for usual, found in ((plain.step(2), marked.step(2)), (plain.evaluation(2), marked.evaluation(2))):
        for (own, wanted), micro_batch in zip(usual, found, strict=True):
            assert len(micro_batch) == 3
            assert torch.equal(micro_batch[0], own)
            # The end token's target is the first token of the next document: no position is left out.
            assert torch.equal(micro_batch[1], wanted)
            assert (own == ord("e")).any()
            assert micro_batch[2].starts.tolist() == [
                [max([0, *(at + 1 for at in range(place) if row[at] == ord("e"))]) for place in range(len(row))]
                for row in own.tolist()
            ]


def test_the_trainer_looks_beside_the_file_that_stated_the_path(tokens, tmp_path, monkeypatch):
    """As the run's provenance keeps it, whatever lies in the job's own folder."""
    (tmp_path / "provenance.json").write_text(json.dumps({"data_beside": str(tokens.parent)}))
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    Path(tokens.name).write_text("no tokens")
    trainer = Trainer(RunFolder(tmp_path), None, SimpleNamespace(local_rank=0), None)
    ranks: Any = SimpleNamespace(is_first=True, barrier=lambda: None, broadcast=lambda value: value)
    relative = settings(Path(tokens.name), {"tp": 1, "pp": 1, "dp": 1})
    wanted = open_samples(settings(tokens, {"tp": 1, "pp": 1, "dp": 1}))
    found, samples = trainer._open_data(relative, ranks)
    assert samples.identity == wanted.identity
    assert found.data.path == str(tokens)
