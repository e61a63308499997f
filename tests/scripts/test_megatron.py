"""Megatron-LM's arguments become an experiment whose run has the same arguments, but for those that the list names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_gpt.engines.megatron_lm import megatron_arguments
from hpc_gpt.scripts.adoption import adopt
from hpc_gpt.scripts.pieces import known
from hpc_gpt.scripts.reading import Reading
from hpc_gpt.settings.cluster import load_profile
from hpc_gpt.settings.experiment_file import load_experiment
from hpc_gpt.settings.resolve import resolve
from tests.scripts.test_public_scripts import init

ARGUMENTS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3 --lr-decay-style cosine --data-path /d/text --bf16"
)


def by_option(words: list[str]) -> dict[str, str]:
    """{option: its values} of a command line."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            found[name] = ""
        else:
            found[name] = f"{found[name]} {word}".strip()
    return found


def same(one: str, two: str) -> bool:
    try:
        return float(one) == pytest.approx(float(two))
    except ValueError:
        return one == two


@pytest.mark.parametrize("name", ["megatron-gpt", "megatron-llama"])
def test_a_run_has_the_scripts_arguments_or_the_list_names_them(name: str, tmp_path: Path) -> None:
    said = init(tmp_path, f"{name}.slurm").stdout
    _, own, rest = said.partition("hpc-gpt does it itself:")
    listed = own + rest
    reading = Reading(tmp_path / f"{name}.slurm", None, tmp_path, {})
    asked = by_option([known(argument) or "" for argument in reading.started.target.arguments])
    profile = load_profile(str(tmp_path / f"{name}-cluster.toml"))
    resolved = resolve(load_experiment(str(tmp_path / f"{name}.toml")), profile)
    runs = by_option(megatron_arguments(resolved, "checkpoints", resolved.data.path))
    assert len(asked) > 30
    taken = said.partition("hpc-gpt does it itself:")[0]
    for option, value in asked.items():
        kept = option in runs and same(runs[option], value)
        assert kept or f"  {option}" in listed or f"  {option} {value} " in taken, (
            f"{option} {value}: {runs.get(option)}"
        )


def adopted(folder: Path, arguments: str) -> tuple[str, str]:
    """(the engine, all that is left out) of a script that starts Megatron-LM on four GPUs."""
    script = folder / "job.slurm"
    script.write_text(f"#SBATCH --gpus-per-node=4\nsrun torchrun --nproc_per_node 4 /m/pretrain_gpt.py {arguments}\n")
    found = adopt(script, None, folder, os.environ)
    return found.experiment["engine.name"], "\n".join(f"{note.text}: {note.means}" for note in found.notes.left)


def test_what_the_engine_trains_alike_is_its_own(tmp_path: Path) -> None:
    assert adopted(tmp_path, ARGUMENTS)[0] == "megatron-lm"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--lr-decay-style linear", "--lr-decay-style linear"),
        ("--context-parallel-size 2", "--context-parallel-size 2"),
        ("--num-experts 8", "--num-experts: mixtures of experts"),
        ("--data-path 0.5 /a 0.5 /b", "--data-path is a blend of 2 data sets"),
        ("--tokenizer-type SentencePieceTokenizer", "does not say how many tokens its vocabulary has"),
        ("--optimizer sgd", "--optimizer sgd"),
        ("--position-embedding-type alibi", "--position-embedding-type alibi"),
        ("--num-layers $LAYERS", "--num-layers has no value that is known before the job"),
        ("--num-layers four", "--num-layers four is no number"),
        ("--pipeline-model-parallel-size 3", "layout tp1-pp3-dp1 needs 3 GPUs"),
        ("--num-attention-heads 5", "64 is not a multiple of heads 5"),
        ("--rampup-batch-size 8 8 100", "--rampup-batch-size: a batch that grows"),
    ],
)
def test_what_it_would_train_otherwise_stays_a_command(more: str, reason: str, tmp_path: Path) -> None:
    engine, left = adopted(tmp_path, f"{ARGUMENTS} {more}")
    assert engine == "command"
    assert "engine megatron-lm cannot be it: " in left
    assert reason in left


def test_a_default_that_the_engine_does_not_have_is_written(tmp_path: Path) -> None:
    script = tmp_path / "job.slurm"
    script.write_text(f"#SBATCH --gpus-per-node=4\nsrun torchrun --nproc_per_node 4 /m/pretrain_gpt.py {ARGUMENTS}\n")
    found = adopt(script, None, tmp_path, {})
    expected = {"train.weight_decay": 0.01, "train.beta2": 0.999, "train.seed": 1234, "train.log_every": 100}
    assert {key: found.experiment[key] for key in expected} == expected
    assert all(found.places[key] == "Megatron-LM's default" for key in expected)
    assert found.experiment["layout.global_batch"] == 8
