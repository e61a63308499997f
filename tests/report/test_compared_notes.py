"""What a comparison notes and claims for what is known of two runs, whole; and how two settings are told apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.compare import compare_runs, setting_differences
from hpc_gpt.report.compare_text import as_tables, comparison_text, verdict_text
from tests.report.test_whole_texts import LOSSES, read

ASSUMED = "{} not known: a step is taken to be the same work in both"
SAME = "the settings are the same{}: the difference comes from the nodes, their load or the day"
FLOPS = "a token is not the same work in both, so tflops_model per GPU is compared, too"
UNKNOWN: dict[str, Any] = {"global_batch": None, "seq": None}


@pytest.mark.parametrize(
    ("of_a", "of_b", "verdict", "speeds", "notes"),
    [
        # The steps of both take 2 s and 1.6 s; what both or one of them say beside it.
        ({}, {}, "faster by 25 % (18 to 32)", {"step_s": (2.0, 1.6)}, []),
        ({}, {"step_s": 2.0}, "no difference shown (-", {"step_s": (2.0, 2.0)}, []),
        ({}, {"global_batch": None}, "faster by", {"step_s": (2.0, 1.6)},
         [ASSUMED.format("global_batch of one run is")]),
        ({"seq": None}, {"global_batch": None}, "faster by", {"step_s": (2.0, 1.6)},
         [ASSUMED.format("global_batch and seq of one run is")]),
        (UNKNOWN, {**UNKNOWN, "gpus": 4}, "faster by", {"step_s": (2.0, 1.6)},
         [ASSUMED.format("the tokens per step are")]),
        (UNKNOWN, {**UNKNOWN, "layers": 9},
         "step time 0.8 x; no interval can be given: a step is not the same work in both", {"step_s": (2.0, 1.6)},
         ["layers is not the same, so a step is not the same work, and the tokens per step are not known"]),
        ({}, {"gpus": 4}, "faster by", {"tokens_per_s": (1200, 1500), "tokens_per_s_gpu": (150, 375)}, []),
        ({}, {"global_batch": 48}, "faster by 150 % (137 to 164)", {"tokens_per_s": (1200, 3000)},
         ["global_batch is not the same, so a step is not the same work: tokens/s are compared",
          "losses at equal steps are not compared: a step of {a} has 2,400 tokens, a step of {b} 4,800"]),
        ({"tflops_model": 40.0}, {"tflops_model": 25.0, "hidden": 80, "heads": 5}, "faster by",
         {"tokens_per_s": (1200, 1500), "tflops_model": (40, 25)},
         ["hidden, heads are not the same, so a step is not the same work: tokens/s are compared", FLOPS]),
        # 1 % more parameters may be the vocabulary's padding.
        ({}, {"params": 2_525_000_000}, "faster by", {"step_s": (2.0, 1.6)}, []),
        ({}, {"vocab": 1512}, "faster by", {"step_s": (2.0, 1.6)},
         ["the vocabularies differ, 500 and 1,512, and so do the scales of the losses"]),
        # How they are related.
        ({"job_id": "5"}, {"job_id": "5"}, "faster by", {"step_s": (2.0, 1.6)},
         ["both belong to job 5: two logs of one run, or two runs in one job"]),
        ({"job_id": "5"}, {"job_id": "5", "rounds": [1.0]}, "faster by", {"step_s": (2.0, 1.6)}, []),
        ({"config_hash": "h"}, {"config_hash": "h"}, "faster by", {"step_s": (2.0, 1.6)}, [SAME.format("")]),
        ({"config_hash": "h"}, {"config_hash": "h", "step_s": 2.0}, "no difference", {"step_s": (2.0, 2.0)}, []),
        ({"config_hash": "h", "node_list": "n1", "settings": {"lr": 1, "x": 1}},
         {"config_hash": "h", "node_list": "n2", "settings": {"lr": 2}}, "faster by", {"step_s": (2.0, 1.6)},
         [SAME.format(" except lr, node_list")]),
        ({"config_hash": "h"}, {"config_hash": "i"}, "faster by", {"step_s": (2.0, 1.6)}, []),
        # The flags of kind "spread" alone.
        ({"flags": ["wide", "few"], "flag_kinds": ["spread", "steps"]}, {"flags": ["odd"], "flag_kinds": ["spread"]},
         "faster by", {"step_s": (2.0, 1.6)}, ["{a}: wide", "{b}: odd"]),
    ],
)  # fmt: skip
def test_what_is_noted_follows_from_what_is_known(
    of_a: dict, of_b: dict, verdict: str, speeds: dict, notes: list
) -> None:
    losses = [loss + 0.5 for loss in LOSSES]
    a = read(LOSSES, of_a.pop("step_s", 2.0), run="a", **of_a)
    b = read(losses, of_b.pop("step_s", 1.6), run="b", **of_b)
    found = compare_runs(a, b)
    assert {each.name: pytest.approx((each.a, each.b)) for each in found.speeds} == speeds
    assert verdict_text(found, "A", "B").startswith(verdict)
    assert list(found.notes) == notes


def test_losses_that_end_alike_have_both_ends_of_what_is_between() -> None:
    wave = [loss + 0.01 * (-1) ** place for place, loss in enumerate(LOSSES)]
    text = comparison_text(compare_runs(read(LOSSES, 2.0, run="a"), read(wave, 1.6, run="b")), "A", "B")
    assert "  loss       no difference shown over the last 8 common steps (-0" in text


def test_bits_per_byte_compare_runs_of_two_tokenizers() -> None:
    """At the evaluations that both have."""

    def evaluated(name: str, vocab: int, bits: float, every: int) -> RunRead:
        run = read(LOSSES, 2.0, run=name, vocab=vocab, bpb=bits)
        places = np.arange(len(LOSSES))
        column = np.where(places % every == 0, bits + 0.001 * places, np.nan)
        return replace(run, steps=replace(run.steps, columns={**run.steps.columns, "bpb": column}))

    found = compare_runs(evaluated("a", 256, 1.25, 2), evaluated("b", 50257, 1.125, 1))
    differ = "the vocabularies differ, 256 and 50,257, and so do the scales of the losses; bpb has one scale"
    assert differ in found.notes
    assert found.bpb is not None
    assert (found.bpb.common_steps, found.bpb.last_common_step) == (21, 41)
    (tables,) = as_tables([found], ["x", "y"])["comparisons"]
    assert (tables["bpb"]["a"], tables["bpb"]["b"]) == (pytest.approx(1.29), pytest.approx(1.165))
    text = comparison_text(found, "A", "B")
    assert "  bpb        1.29 -> 1.165 at step 41, the last that both have\n" in text
    assert "they diverge: the bpb of B is lower by 0.12 (0.12 to 0.12) over the last 8 common evaluations" in text


def test_equal_losses_are_of_one_run_from_eight_steps_on() -> None:
    equal = "equal losses: two logs of one run, or a repeat of the same training"
    a = read(LOSSES, 2.0, run="a")
    for count, notes in ((8, [equal]), (7, [])):
        assert compare_runs(a, read(LOSSES[:count], 1.6, run="b")).notes == notes
    for more in ({"rounds": [1.0]}, {"job_id": "6"}):
        assert compare_runs(a, read(LOSSES, 1.6, run="b", **more)).notes == ([] if "rounds" in more else [equal])
    ours = replace(a, folder=Path("a"))
    assert compare_runs(ours, read(LOSSES, 1.6, run="b")).notes == []


def test_skipped_steps_are_noted_if_they_are_steady() -> None:
    note = "some steady steps of {} were skipped: they did no optimizer work"
    runs = [read(LOSSES, 2.0, run=name) for name in "ab"]
    one = np.arange(len(LOSSES))

    def with_skipped(run: RunRead, place: int) -> RunRead:
        skipped = (one == place).astype(np.float64)
        return replace(run, steps=replace(run.steps, columns={**run.steps.columns, "skipped": skipped}))

    a, b = runs
    assert note.format("{a}") in compare_runs(with_skipped(a, 3), b).notes
    found = compare_runs(a, with_skipped(b, 40))
    assert note.format("{b}") in found.notes
    tables = as_tables([found], ["x", "y"])
    assert (tables["schema"], tables["level"]) == (1, 0.95)
    assert note.format("B") in tables["comparisons"][0]["notes"]
    assert not [each for each in compare_runs(with_skipped(a, 0), b).notes if "skipped" in each]


def row(name: str, file: str, *rounds: float, **more: Any) -> RunRead:
    rate = float(np.median(rounds))
    return RunRead(Record(run=name, tokens_per_s=rate, **more), rounds=rounds, files=[Path(file)])


WIDE = "the interval is wide, as there are only {} rounds: use --rounds 5 or more"
PAIRS = "the interval comes from the {} ratios of rounds, which were measured in turns"
APART = "the rows belong to two sweeps, so their rounds are not pairs"


@pytest.mark.parametrize(
    ("a", "b", "verdict", "notes"),
    [
        # A machine that grows warm slows both: the ratios of one race are even, and rounds of two races are not.
        (row("p", "f", 100, 80, 60, 40, 20), row("q", "f", 110, 88, 66, 44, 22), "faster by 10", [PAIRS.format(5)]),
        (row("p", "f", 100, 80, 60, 40, 20), row("q", "g", 110, 88, 66, 44, 22), "no difference shown", [APART]),
        (row("p", "f", 100, 99, 98, 97), row("q", "f", 50, 49, 48), "slower by 50 % (48.9 to 51.6)",
         [PAIRS.format(3), WIDE.format(3)]),
        (row("p", "f", 100, 99), row("q", "f", 50, 49, 48),
         "tokens/s 0.492 x; no interval can be given: A has 2 rounds, but an interval needs 3", []),
        (row("p", "f", 100, 99, 98), row("q", "f", 50),
         "tokens/s 0.505 x; no interval can be given: B has 1 round, but an interval needs 3", []),
        (row("p", "f", 100, 99, 98), read(LOSSES, 1.6, run="b"),
         "no interval can be given: A is a row of a sweep, which has rounds but no single steps: compare the run "
         "folders of its rounds", [ASSUMED.format("global_batch and seq of one run is")]),
    ],
)  # fmt: skip
def test_rows_are_compared_by_rounds(a: RunRead, b: RunRead, verdict: str, notes: list[str]) -> None:
    found = compare_runs(a, b)
    assert verdict_text(found, "A", "B").startswith(verdict)
    assert list(found.notes) == notes
    assert found.rounds == ((len(a.rounds), len(b.rounds)) if b.rounds else (0, 0))


def test_a_run_is_the_same_by_its_folder_or_its_files_and_name() -> None:
    a, b = read(LOSSES, 2.0, run="a"), read(LOSSES, 2.5, run="b")
    in_x = replace(a, folder=Path("x"))
    words = {
        "the same run as A": [
            (a, replace(b, record=replace(b.record, run="a"), files=a.files)),
            (in_x, replace(b, folder=Path("x"))),
        ],
        "slower by": [(a, replace(b, files=a.files)), (in_x, replace(b, folder=Path("y")))],
        "the same steps and figures as A: two copies of one log": [(a, read(LOSSES, 2.0, run="c"))],
    }
    for text, pairs in words.items():
        assert all(verdict_text(compare_runs(*pair), "A", "B").startswith(text) for pair in pairs), text


NAMING = (
    "path", "paths", "dir", "folder", "file", "files", "save", "load", "name", "project", "entity", "wandb",
    "tensorboard", "log", "logging", "host", "hostname", "addr", "port", "rank", "time", "date", "title", "version",
    "user", "tag", "output", "exit", "prompt", "resumed", "sweep", "interval",
)  # fmt: skip
# In the order of what decides speed; each key is of its own weight, the last pair is stated by one alone.
ORDER = [
    "device", "gpus", "nodes", "engine", "tp", "pp", "cp", "dp", "zero_stage", "micro_batch", "micro_batches",
    "global_batch", "seq", "params", "hidden", "layers", "heads", "vocab", "recompute", "dtype", "matmul",
    "attention_used",
    *("X_Parallel", "zero3.x", "my_stage", "offload_it", "recompute_n", "checkpoint_activations", "checkpoint_num_x",
      "use_flash", "compile", "bias_fusion", "overlap_p2p", "bucket_mb", "prefetch", "batch_warmup", "accumulation",
      "nccl_algo", "precision", "a.matmul", "bf16", "fp16", "fp8", "tf32", "workers", "reshard", "optimizer",
      "experts", "capacity"),
    *("matmul_x", "lr", "seed", "logger"),
    *("node_list", "versions.torch"),
    *("Save-Dir", "bf16_name", *(f"a.{word}" for word in NAMING)),
]  # fmt: skip


def test_settings_come_in_the_order_of_what_decides_speed() -> None:
    own = {key: place for place, key in enumerate(ORDER)}
    fields = {key: own.pop(key) for key in ORDER if key in Record.__annotations__ and key != "node_list"}
    versions = {"torch": "1"}
    del own["versions.torch"], own["node_list"]
    # What a sweep varies, figures, secrets and what is a key of its own are left out.
    sweep = {
        "hub_token": "hf_x",
        "sweep": {"varied": {"lr": 1}},
        "timers_ms": {"x": 1},
        "engine": {"name": 1},
        "train": {"dtype": 1},
    }
    a = Record(run="a", config_hash="h1", node_list="n1", versions=versions, settings={**sweep, **own}, **fields)
    other = {key: value + 1000 for key, value in own.items()}
    b = Record(run="b", config_hash="h2", node_list="n2", versions={"torch": "2"},
               settings={"hub_token": "hf_y", "timers_ms": {"x": 2}, "sweep": {"varied": {"lr": 2}}, "only": 1} | other,
               **{key: value + 1000 for key, value in fields.items()})  # fmt: skip
    found = setting_differences(a, b)
    assert [each.key for each in found] == [*ORDER, "only"]
    assert [each.is_stated for each in found] == [True] * len(ORDER) + [False]
    assert (found[0].a, found[0].b) == (0, 1000)


ALIKE = [
    (True, "true", "yes", "ON", " on ", 1, "1", 1.0), (False, "false", "no", "off", "None", "null", 0, "0.0"),
    (float("nan"), "nan"), ("['a']", '["A"]', "a"), (0.5, "5e-1"), ([1, 2], [1, 2]),
]  # fmt: skip


def test_one_value_is_written_in_many_ways() -> None:
    def differ(a: object, b: object) -> bool:
        return bool(setting_differences(Record(run="a", settings={"n": a}), Record(run="b", settings={"n": b})))

    for place, ways in enumerate(ALIKE):
        assert not [(one, other) for one in ways for other in ways if differ(one, other)]
        others = [other for each in ALIKE[:place] for other in each]
        assert all(differ(one, other) for one in ways for other in others)
    assert differ("['a', 'b']", "a', 'b")
    assert differ("['a']", "['b']")


def test_json_has_each_figure_under_its_key() -> None:
    a = read(LOSSES, 2.0, run="a", name="na", memory_reserved_gib=[3.0], memory_allocated_gib=[2.0], cause="x")
    b = read([*LOSSES[:20], *(loss + 0.5 for loss in LOSSES[20:])], 1.6, run="b", name="nb", memory_reserved_gib=[5.0],
             ended="error", cause="boom", settings={"y": 1}, gpus=4)  # fmt: skip
    (found,) = as_tables([compare_runs(a, b)], ["x", "y"])["comparisons"]
    by_tokens, per_gpu = found.pop("speeds")
    assert (by_tokens["a"], by_tokens["b"], by_tokens["faster_percent"]) == (1200.0, 1500.0, pytest.approx(25))
    assert 18 < by_tokens["low_percent"] < 25 < by_tokens["high_percent"] < 33
    assert (per_gpu["name"], per_gpu["faster_percent"]) == ("tokens_per_s_gpu", pytest.approx(150))
    assert found.pop("loss") == {
        "common_steps": 41, "last_common_step": 41.0, "a": 2.0, "b": 2.5, "alike_steps": 20, "diverge": True,
        "tail_steps": 8, **dict.fromkeys(("tail_difference", "tail_low", "tail_high"), pytest.approx(0.5)),
    }  # fmt: skip
    assert found.pop("words").startswith("faster by 25 % (18")
    assert found.pop("bpb") is None
    assert found == {
        "a": "x", "b": "y", "runs": ["a", "b"], "names": ["na", "nb"], "verdict": "faster", "steady_steps": [40, 40],
        "rounds": [0, 0], "no_interval": [], "differ": [{"key": "gpus", "a": 8, "b": 4}],
        "stated_by_one": [{"key": "y", "a": None, "b": 1}], "memory_allocated_gib": [[2.0], None],
        "memory_reserved_gib": [[3.0], [5.0]], "ended": ["done", "error"], "cause": ["x", "boom"], "notes": [],
    }  # fmt: skip
