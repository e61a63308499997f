"""A plan of a program of one's own, `[plan] like`: the physics of the engine that it is like, and not its limits."""

import json
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest

from bench.published.door import ask_plan
from bench.published.mixtures import FILE as MIXTURES
from bench.published.rows import PublishedRow, read_rows
from hpc_gpt.core.engines.base.programs import KINDS
from hpc_gpt.core.engines.base.training import Training
from tests import marked
from tests.cli.command import error_of, in_process

LLAMA = "preset = 'llama3.1-8b'\nseq = 8192\n"


def asked(folder: Path, plan: str, *words: str, model: str = LLAMA) -> dict:
    """The best candidate of a program's plan on 8 H100s of 80 GB, as JSON."""
    experiment = folder / "mine.toml"
    experiment.write_text(
        f"[engine]\nname = 'command'\n[command]\nrun = 'torchrun train.py'\n[model]\n{model}[plan]\n{plan}\n"
    )
    done = in_process("plan", experiment, "--cluster", "h100-80g-8", "--json", *words, code=0)
    return json.loads(done.stdout)["candidates"][0]


@pytest.mark.parametrize(
    "words",
    [
        ("--pp", "2", "--dp", "4", "--mbs", "1", "--gbs", "16"),
        ("--tp", "4", "--dp", "2", "--mbs", "1", "--gbs", "16", "--set", "engine.sequence_parallel=true"),
        ("--pp", "2", "--dp", "4", "--mbs", "1", "--gbs", "16", "--set", "engine.recompute=mlp"),
        ("--cp", "2", "--dp", "4", "--mbs", "1", "--gbs", "16", "--set", "engine.cp_exchange=ring"),
    ],
)
def test_what_its_engine_cannot_do_is_planned(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert asked(tmp_path, "like = 'fsdp'\nstates = 'fp32'", "--gpus", "8", *words)


def test_a_kind_belongs_to_its_engine(tmp_path: Path) -> None:
    experiment = tmp_path / "mine.toml"
    experiment.write_text(
        f"[engine]\nname = 'command'\n[command]\nrun = 'x'\n[model]\n{LLAMA}[plan]\nlike = 'ddp'\nkind = 'fp32 sums'\n"
    )
    said = error_of(in_process("plan", experiment, "--cluster", "h100-80g-8", "--gpus", "8", code=2))
    assert "plan.kind is fp32 sums, but no program like ddp is of that kind" in said


@pytest.mark.parametrize(
    ("key", "is_idle"),
    [
        ("engine.gather_blocks=2", True),
        ("engine.attention=flash", True),  # plan.attention names the kernel
        ("engine.loss_chunks=4", False),
        ("engine.compile=block", False),
    ],
)
def test_a_key_that_changes_nothing_is_said(tmp_path: Path, key: str, is_idle: bool) -> None:
    experiment = tmp_path / "mine.toml"
    experiment.write_text(
        f"[engine]\nname = 'command'\n[command]\nrun = 'x'\n[model]\n{LLAMA}[plan]\nlike = 'fsdp'\nattention = 'sdpa'\n"
    )
    words = ("--cluster", "h100-80g-8", "--gpus", "8", "--dp", "8", "--gbs", "16", "--set", key)
    done = in_process("plan", experiment, *words, code=0)
    said = f"note: {key.partition('=')[0]} changes nothing in this plan of a program"
    assert (said in done.stderr.splitlines()) == is_idle


def test_ranks_of_cp_that_no_program_can_divide_are_left_out(tmp_path: Path) -> None:
    """Where nothing is known to fit on 8 GPUs more are tried, and with them each cp."""
    experiment = tmp_path / "mine.toml"
    experiment.write_text(f"[engine]\nname = 'command'\n[command]\nrun = 'x'\n[model]\n{LLAMA}[plan]\nlike = 'fsdp'\n")
    words = (
        "--device",
        "h100-80g",
        "--gpus",
        "8",
        "--dp",
        "8",
        "--gbs",
        "16",
        "--set",
        "engine.activation_offload=true",
    )
    in_process("plan", experiment, *words, code=0)


def test_a_fault_of_a_plan_comes_alone(tmp_path: Path) -> None:
    experiment = tmp_path / "mine.toml"
    experiment.write_text(
        f"[engine]\nname = 'command'\n[command]\nrun = 'x'\n[model]\n{LLAMA}[plan]\nlike = 'fsdp'\n[layout]\ntp = 3\n"
    )
    said = error_of(in_process("plan", experiment, "--cluster", "h100-80g-8", "--gpus", "8", "--tp", "3", code=2))
    assert "train.steps" not in " ".join(said)


def test_every_kind_has_states_of_its_own() -> None:
    assert len({id(states) for states in KINDS.values()}) == len(KINDS)


# Fields that differ without a difference: an exchange over cp 1, of tokens without experts, what nothing shards, and
# what the engine's facts have by themselves.
SAME = {"cp_exchange", "dispatcher", "zero_stage", "attention", "sharded_optimizer"}


@pytest.mark.shared
@pytest.mark.parametrize("file", marked(["open.json", "open2.json", MIXTURES], {"open.json"}))
def test_a_plan_of_a_published_row_is_its_own_training(shared: Path, file: str) -> None:
    """Each field of a Training that a row sets is reached by a key, so `plan` answers what is published."""
    other = []
    for row in read_rows(shared / "planner" / file).rows:
        with tempfile.TemporaryDirectory() as folder:
            searched = ask_plan(row, Path(folder))
        found = [candidate.training for candidate in searched.candidates or searched.too_large]
        other += [
            f"{row.id}: {nearest}" for nearest in [min((unlike(row, each) for each in found), key=len)] if nearest
        ]
    assert other == []


def unlike(row: PublishedRow, planned: Training) -> list[str]:
    names = [entry.name for entry in fields(Training) if entry.name not in SAME]
    return [name for name in names if getattr(row.training, name) != getattr(planned, name)]


def test_layers_that_predict_later_tokens_can_be_left_out(tmp_path: Path) -> None:
    model = "preset = 'deepseek-v3'\nseq = 4096\nmtp_layers = 0\n"
    words = ("--gpus", "1024", "--dp", "256", "--pp", "4", "--ep", "64", "--gbs", "2048", "--recompute", "full")
    without = asked(tmp_path, "like = 'megatron-lm'", *words, model=model)
    with_one = asked(tmp_path, "like = 'megatron-lm'", *words, model=model.replace("mtp_layers = 0\n", ""))
    assert without["figures"]["step_s"] < with_one["figures"]["step_s"]


def test_what_a_programs_file_says_of_its_engine_is_no_choice(tmp_path: Path) -> None:
    """An option without a value leaves the key to the search again."""
    experiment = tmp_path / "mine.toml"
    experiment.write_text(
        f"[engine]\nname = 'command'\nrecompute = 'full'\ncompile = 'none'\n[command]\nrun = 'x'\n[model]\n{LLAMA}"
        "[plan]\nlike = 'fsdp'\n"
    )
    words = ("plan", experiment, "--cluster", "h100-80g-8", "--gpus", "8", "--dp", "8", "--gbs", "16", "--json")
    as_stated, open_again = (
        json.loads(in_process(*words, *more, code=0).stdout)["candidates"][0]
        for more in ((), ("--set", "engine.recompute=", "--set", "engine.compile="))
    )
    assert (as_stated["recompute"], as_stated["compiled"]) == ("full", False)
    assert (open_again["recompute"] == "full", open_again["compiled"]) == (False, True)
