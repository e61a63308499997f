"""What --branch prints, what it takes of another run, what it refuses, and when --resume sends its user there."""

import json
import os
from pathlib import Path

from hpc_gpt.core.checkpoints.lineage import Parent
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.branching import branch_lines
from hpc_gpt.launcher.descent import descend
from hpc_gpt.trainer.tokens.tokenizer import CharTokenizer
from tests.cli.command import error_of, in_process
from tests.made_runs import a_run

WSD = {"train__decay": "wsd", "train__decay_steps": 4, "train__warmup_steps": 2, "train__lr": 1e-3}


def saved(*steps: int, ended: str | None = "done", **settings: object) -> RunFolder:
    """A run of 20 steps of random tokens with checkpoints of these."""
    small = {"train__steps": 20, "data__source": "random", "train__warmup_steps": 2}
    return a_run(max(steps), ended, saved=steps, **{**small, **settings})


def settings_of(*words: str) -> Resolved:
    """The settings that a dry run would submit."""
    text = in_process("submit", *words, "--dry-run", "--script", code=0).stdout.partition("# --- settings: ")[2]
    return Resolved.from_json(text[text.index("\n{") : text.index("\n}\n") + 3])


def test_a_branch_changes_what_is_named_and_the_rest_stays():
    run = saved(8, **WSD, train__min_lr=1e-5)
    changes = {"lr": 5e-4, "min_lr": 1e-4, "decay": "cosine", "weight_decay": 0.2, "steps": 30}
    words = [word for key, value in changes.items() for word in ("--set", f"train.{key}={value}")]
    found = settings_of("--branch", f"{run.run_id}@8", *words, "--set", "data.eval_fraction=0.1")
    before = run.resolved().train
    assert {key: getattr(found.train, key) for key in changes} == changes
    assert (found.train.decay_steps, found.train.decay_shape) == (None, "linear"), "parts of the other schedule"
    assert (found.train.warmup_steps, found.train.seed, found.train.save_every) == (2, before.seed, before.save_every)
    assert (found.data.source, found.data.eval_fraction, found.data_from) == ("random", 0.1, 8)
    masked = ("--set", "data.mask_documents=true", "--set", "data.end_token=10")
    assert settings_of("--branch", f"{run.run_id}@8", *masked).data_from == 0, "the same samples"
    same = settings_of("--branch", f"{run.run_id}@8", "--set", "train.decay_shape=1-sqrt", "--pp", "1")
    assert (same.train.decay_steps, same.train.decay_shape, same.data_from) == (4, "1-sqrt", 0)
    assert (same.layout.pp, same.batch.global_batch) == (1, run.resolved().batch.global_batch)
    assert '"data_from"' not in same.to_json()


def test_a_branch_of_another_optimizer_drops_the_firsts_keys():
    alone = {"engine__name": "ddp", "layout__tp": 1, "layout__pp": 1}
    run = saved(8, **alone, train__optimizer="muon", train__muon_lr=0.1, train__beta1=0.8)
    before = run.resolved()
    branch = descend(before, {"train.optimizer": "adamw"}, before.cluster, 8, branch=True)
    found = branch.train
    assert (found.optimizer, found.muon_lr, found.beta1) == ("adamw", None, 0.8)
    assert "train.optimizer muon -> adamw: its states begin at zero" in branch_lines(before, branch, run, 8)
    found = descend(before, {"train.optimizer": "sgd"}, before.cluster, 8, branch=True).train
    assert (found.muon_lr, found.beta1) == (None, 0.9)


def test_a_branch_may_begin_a_mixture():
    before = saved(8, data__source="stdlib").resolved()
    sources = {"web.path": "a.tokens", "web.weight": 0.9, "code.path": "b.tokens", "code.weight": 0.1}
    changes = {"data.source": "mix", **{f"data.mix.{key}": value for key, value in sources.items()}}
    found = descend(before, changes, before.cluster, 8, branch=True)
    assert found.data.mix is not None
    assert {name: (each.path, each.weight) for name, each in found.data.mix.items()} == {
        "web": ("a.tokens", 0.9), "code": ("b.tokens", 0.1)
    }  # fmt: skip
    assert (found.data_from, found.data_steps) == (8, 12)
    again = descend(found, {"data.mix.web.weight": 0.5}, before.cluster, 10, branch=True)
    assert (again.data.mix["web"].weight, again.data.mix["code"].weight, again.data_from) == (0.5, 0.1, 10)


def test_a_run_from_step_0_begins_its_data_there():
    run = saved(8)
    resolved = json.loads((run.path / "resolved.json").read_text())
    (run.path / "resolved.json").write_text(json.dumps(resolved | {"data_from": 4}))
    assert settings_of("--resume", run.run_id, "--until", "steps=40").data_from == 4
    assert settings_of("--resume", run.run_id, "--from-start").data_from == 0


def test_minutes_that_the_run_has_had_by_then_are_refused():
    """What else no branch can be is in refused/runs.txt."""
    run = saved(8, **WSD)
    marker = run.checkpoints / "step-00000008" / "complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"train_s": 120.0}))
    message, hint = error_of(in_process("submit", "--branch", f"{run.run_id}@8", "--set", "train.minutes=1.0", code=2))
    assert "train.minutes is 1, and step 8 came after 2 minutes" in message
    assert "minutes=4" in hint


def test_a_longer_wsd_resumes_if_no_trained_rate_changes():
    run = saved(8, 16, ended="stopped", **WSD)
    found = settings_of("--resume", run.run_id, "--until", "steps=40")
    assert (found.train.steps, found.train.decay_steps) == (40, 4)
    assert "rate differs" not in in_process("submit", "--resume", run.run_id, "--until", "steps=40", "--dry-run").stderr


def test_a_wsd_that_has_decayed_is_sent_to_a_branch():
    run = saved(8, 16, 20, **WSD)
    message, hint = error_of(in_process("submit", "--resume", run.run_id, "--until", "steps=40", code=2))
    assert message.startswith(f"step 18 of run {run.run_id} was trained at a rate of 0.00075, but the ")
    assert "wsd over 20 steps: up to 0.001 in 2 steps, constant to step 16" in message
    assert "wsd over 40 steps: up to 0.001 in 2 steps, constant to step 36" in message
    assert hint == f"hpc-gpt submit --branch {run.run_id}@16 --set train.steps=40 begins before that step"
    assert settings_of(*hint.partition(" begins")[0].split()[2:]).train.steps == 40
    _, hint = error_of(in_process("submit", "--resume", run.run_id))
    assert hint == f"to train on, as a new run: hpc-gpt submit --branch {run.run_id}@16 --until steps=40"
    only = saved(20, **WSD)
    assert (
        "@20 --set train.steps=40 begins after the decay"
        in error_of(in_process("submit", "--resume", only.run_id, "--until", "steps=40"))[1]
    )


def test_status_and_report_name_the_parent():
    run, own = saved(8), saved(12)
    note = Parent(run.run_id, str(run.path), 8, branch=True).note
    (own.path / "resumed_from.json").write_text(json.dumps(note))
    assert f"{own.run_id}: a branch of {run.run_id}@8" in in_process("status").stdout
    rows = {row["run"]: row["branch_of"] for row in json.loads(in_process("status", "--json").stdout)["runs"]}
    assert rows == {run.run_id: None, own.run_id: f"{run.run_id}@8"}
    said = f"note: demo/{own.run_id}: begins from step 8 of run {run.run_id}, as a branch"
    assert said in in_process("report", own.path).stderr
    [record] = json.loads(in_process("report", own.path, "--json").stdout)["records"]
    assert record["settings"]["resumed_from"] == {"run": run.run_id, "step": 8, "branch": True}


def test_its_words_are_found_by_those_who_say_fork():
    assert "submit --branch RUN@STEP" in in_process("fork").stderr
    assert Path(os.environ["HPC_GPT_LOGS"]).exists() is False


def test_a_branch_to_other_data_keeps_that_files_tokenizer(tmp_path, monkeypatch):
    (beside := tmp_path / "beside").mkdir()
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    for folder, name in ((beside, "old.txt"), (here, "new.txt")):
        (folder / name).write_text("abc" * 5000)
    (beside / "t.vocab.json").write_text(CharTokenizer("abc").to_json())
    data = {"source": "stream", "path": "old.txt", "tokenizer": "t.vocab.json", "workers": 0, "eval_fraction": 0.0}
    run = saved(8, **{f"data__{key}": value for key, value in data.items()}, train__eval_every=0, model__vocab=256)
    (run.path / "provenance.json").write_text(json.dumps({"data_beside": str(beside)}))
    branch = ("--branch", f"{run.run_id}@8", "--until", "steps=12")
    found = settings_of(*branch, "--set", "data.path=new.txt").data
    assert (found.path, found.tokenizer) == ("new.txt", str(beside / "t.vocab.json"))
    assert settings_of(*branch).data.tokenizer == "t.vocab.json"


def test_a_branch_may_change_the_balance_of_its_experts():
    shape = {"bias": "none", "experts": 4, "experts_per_token": 2, "expert_ffn": 8, "router_bias": True}
    by_bias, by_loss = (
        saved(8, **{f"model__{key}": value for key, value in of_router.items()})
        for of_router in (shape, {**shape, "router_bias": False})
    )
    assert (by_bias.resolved().train.balance, by_loss.resolved().train.balance) == ("bias", "loss")
    done = in_process("submit", "--branch", f"{by_bias.run_id}@8", "--set", "train.balance_rate=0", "--set",
                      "train.z_loss=0.01", "--dry-run", code=0)  # fmt: skip
    line = "balance of the experts: train.balance_rate 0.001 -> 0.0, train.z_loss 0.0 -> 0.01"
    assert line in done.stdout + done.stderr
    none = settings_of("--branch", f"{by_loss.run_id}@8", "--set", "train.balance=none")
    assert none.train.balance == "none"
    message, _ = error_of(
        in_process("submit", "--branch", f"{by_bias.run_id}@8", "--set", "train.balance=none", "--dry-run", code=2)
    )
    assert message == "train.balance would be none, but is bias in the checkpoint's run"
    error_of(in_process("submit", "--resume", by_loss.run_id, "--set", "train.z_loss=0.01", "--dry-run", code=2))
