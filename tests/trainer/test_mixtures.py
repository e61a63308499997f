"""A mixture in real training: it continues after a resume, and every layout reads the same samples."""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.data_source import MixedSource
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.reader.runs.own_run import read_own
from hpc_gpt.report.exports import curve_of
from hpc_gpt.report.tables import losses_by_source
from hpc_gpt.trainer.tokens.build import build_tokens
from tests.trainer.launch import figures, lines, new_run, settings, train

pytestmark = pytest.mark.xdist_group("train-mixtures")

STEPS, HALF = 12, 6
DDP = Engine("ddp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """upper.tokens and lower.tokens: letters that no other source has."""
    folder = tmp_path_factory.mktemp("sources")
    for name, letters in (("upper", "ABCDEFGHIJ"), ("lower", "klmnopqrst")):
        (folder / f"{name}.txt").write_text("".join(letters[n * n % 10] + letters[n % 7] for n in range(3000)))
        build_tokens(folder / f"{name}.txt", folder / f"{name}.tokens")
    return folder


def mixing(
    folder: Path, layout: Mapping[str, int], engine: Engine | str = DDP, zero: int | None = None, **more: Any
) -> Resolved:
    """16 samples a step; three upper to one lower, then only lower from step HALF + 2 on, counted from 0."""
    keys = {"steps": STEPS, "eval_every": HALF, "eval_batches": 1, "save_every": HALF, **more}
    chosen = engine if isinstance(engine, Engine) else Engine(engine, zero)
    plain = settings(folder, {"global_batch": 16, "micro_batches": None, **layout}, chosen, **keys)
    weights = {"lower": (0.25, 1.0), "upper": (0.75, 0.0)}
    mix = {name: MixedSource(str(folder / f"{name}.tokens"), weight=weight) for name, weight in weights.items()}
    phases = ((HALF + 1.5) * 16 * plain.model.seq,)
    return replace(plain, data=replace(plain.data, source="mix", path=None, mix=mix, phases=phases))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> RunFolder:
    run = new_run(tmp_path_factory.mktemp("unbroken"), mixing(folder, {"tp": 1, "pp": 1, "dp": 2}))
    launch = train(run, 2)
    assert launch.ended == ("done", STEPS, False), launch.log
    return run


def test_each_source_is_evaluated_and_loss_eval_is_their_mean(unbroken: RunFolder) -> None:
    found = lines(unbroken)
    evaluated = [line for line in found if line["loss_eval"] is not None]
    assert [line["step"] for line in evaluated] == [HALF, STEPS]
    assert [line["loss_eval_by"] for line in found if line not in evaluated] == [None] * (STEPS - 2)
    for line in evaluated:
        by = line["loss_eval_by"]
        assert [*by] == ["lower", "upper"]
        assert line["loss_eval"] == pytest.approx(0.25 * by["lower"] + 0.75 * by["upper"], rel=1e-12)
        assert by["lower"] != by["upper"]
        # Both texts are bytes, and an evaluation reads no document's end.
        assert line["bpb_by"] == {name: pytest.approx(loss / math.log(2), rel=1e-6) for name, loss in by.items()}
        assert line["bpb"] == pytest.approx(line["loss_eval"] / math.log(2), rel=1e-6)
    assert {line["bpb"] for line in found if line not in evaluated} == {None}


def test_report_and_exports_have_them(unbroken: RunFolder) -> None:
    run = read_own(unbroken)
    last = lines(unbroken)[-1]
    keys = ("loss_eval", "loss_eval_by", "bpb", "bpb_by")
    assert {key: getattr(run.record, key) for key in keys} == {key: last[key] for key in keys}
    assert losses_by_source(run.record) == ", ".join(
        f"{name} {loss:.3f} ({last['bpb_by'][name]:.4f} bpb)" for name, loss in last["loss_eval_by"].items()
    )
    _, rows = curve_of(run)
    tags = {
        step: {tag: figure for tag, figure in row.items() if "_by/" in tag or tag == "bpb"} for step, _, row in rows
    }
    assert {step for step, row in tags.items() if row} == {HALF, STEPS}
    by_source = {f"{key}/{name}": last[key][name] for key in keys if key.endswith("_by") for name in last[key]}
    assert tags[STEPS] == {"bpb": last["bpb"], **by_source}
    (printed,) = [line for line in unbroken.attempts()[0].logs[0].read_text().splitlines() if f"step {STEPS}/" in line]
    assert f" | loss_eval {last['loss_eval']:.4f} | bpb {last['bpb']:.4f} | " in printed


def test_a_resume_continues_the_mixture_to_the_last_digit(unbroken: RunFolder, tmp_path: Path) -> None:
    """From before the phase's begin, over it."""
    again = RunFolder(shutil.copytree(unbroken.path, tmp_path / "again"))
    shutil.rmtree(again.checkpoints / f"step-{STEPS:08d}")
    launch = train(again, 2)
    assert f"resumed after step {HALF} of {STEPS}" in launch.log
    assert figures(again)[STEPS:] == figures(unbroken)[HALF:]
    assert [line["loss_eval_by"] for line in lines(again)[STEPS:]] == [
        line["loss_eval_by"] for line in lines(unbroken)[HALF:]
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "layout", "zero"),
    [
        ("deepspeed-3d", {"tp": 1, "pp": 2, "dp": 1}, 0), ("deepspeed-3d", {"tp": 2, "pp": 2, "dp": 1}, 1),
        ("fsdp", {"tp": 1, "pp": 1, "dp": 2}, None), ("deepspeed-zero", {"tp": 2, "pp": 1, "dp": 2}, 2),
        ("hf-deepspeed", {"tp": 1, "pp": 1, "dp": 2}, 3),
    ],
)  # fmt: skip
def test_every_engine_trains_and_evaluates_on_it(unbroken, folder, tmp_path, engine, layout, zero):
    """The same seeds, the same samples: the same losses, but of transformers' own model."""
    run = new_run(tmp_path, mixing(folder, layout, engine, zero))
    launch = train(run, layout["tp"] * layout["pp"] * layout["dp"])
    assert launch.ended == ("done", STEPS, False), launch.log
    for own, one in zip(lines(run), lines(unbroken), strict=True):
        assert [*(own["loss_eval_by"] or {})] == [*(one["loss_eval_by"] or {})]
        if engine != "hf-deepspeed":
            assert own["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert own["loss_eval_by"] == (one["loss_eval_by"] and pytest.approx(one["loss_eval_by"], abs=1e-5))


# How the optimizer's states are held, and the weights split, each with a layout.
HELD = {
    "offloaded": ({"tp": 1, "pp": 1, "dp": 2}, Engine("deepspeed-zero", 2, offload="optimizer")),
    "two stages": ({"tp": 1, "pp": 2, "dp": 1}, Engine("deepspeed-3d", recompute="full")),
}


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """Trains a mixture of documents, and returns its losses, of each evaluation those of both sources, too."""
    folder = tmp_path_factory.mktemp("documents")
    for name, letters in (("upper", "ABCDEF GHIJ"), ("lower", "klmn opqrst")):
        (folder / f"{name}.txt").write_text("".join(letters[n * n % 11] + letters[n % 7] for n in range(3000)))
        build_tokens(folder / f"{name}.txt", folder / f"{name}.tokens")

    def losses(layout: Mapping[str, int], engine: Engine, mask: bool = True) -> list[float]:
        resolved = mixing(folder, layout, engine)
        marks = {"mask_documents": True, "end_token": ord(" ")} if mask else {}
        resolved = replace(resolved, data=replace(resolved.data, **marks))
        run = new_run(tmp_path_factory.mktemp("run"), resolved)
        launch = train(run, resolved.layout.gpus)
        assert launch.ended == ("done", STEPS, False), launch.log
        found = lines(run)
        by_source = [loss for line in found for loss in (line["loss_eval_by"] or {}).values()]
        return [*(line["loss"] for line in found), *by_source]

    return losses


@pytest.fixture(scope="module")
def by_one_rank(masked: Callable[..., list[float]]) -> list[float]:
    return masked({"tp": 1, "pp": 1, "dp": 1}, DDP)


@pytest.mark.long
@pytest.mark.parametrize("held", HELD)
def test_documents_of_a_mixture_are_kept_apart_in_every_engine(held, masked, by_one_rank):
    assert masked(*HELD[held]) == pytest.approx(by_one_rank, abs=4e-6)


@pytest.mark.long
def test_a_mixtures_documents_see_others_unless_masked(masked, by_one_rank):
    unmasked = masked({"tp": 1, "pp": 1, "dp": 1}, DDP, mask=False)
    assert all(abs(a - b) > 1e-4 for a, b in zip(by_one_rank, unmasked, strict=True))
