"""hpc-gpt help: the engines as the rules have them."""

import json
import re
from dataclasses import fields

import pytest

from hpc_gpt import __version__
from hpc_gpt.core.engines import engines
from hpc_gpt.core.settings.experiment import Engine
from tests.cli.command import error_of, in_process
from tests.made_runs import unsubmitted_run


def test_every_engine_is_listed_with_what_it_takes():
    shown = in_process("help", "engines").stdout
    assert "deepspeed-3d: tp x pp x cp x dp; ZeRO 0, 1\n" in shown
    assert "ddp: cp x dp\n" in shown
    assert "hf-deepspeed: dp; ZeRO" in shown
    names = [line.partition(":")[0] for line in shown.partition("\n\n")[0].splitlines() if not line.startswith(" ")]
    assert names == list(engines())
    words = set(re.split(r"[\s,]+", shown))
    assert {entry.name for entry in fields(Engine)} - {"name", "zero_stage"} <= words


@pytest.mark.parametrize("words", [(), ("help",), ("profile",)])
def test_no_description_of_a_command_is_cut(words):
    usage, _, rest = in_process(*words, "--help").stdout.partition("\n")
    assert usage.endswith("COMMAND [ARGS]...")
    assert [line for line in rest.splitlines() if line.endswith("...")] == []


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("lr", "train.lr "),
        ("mbs", "layout.micro_batch "),
        ("wsd", "train.decay "),
        ("warmup", "train.warmup_steps "),
        ("rotation", "model.rope_theta "),
        ("fsdp", "fsdp: tp x cp x dp\n\nengine.name "),
        ("fsdp", "engine.prefetch "),
        ("GPT2", "--model gpt2: 0.124e9 parameters, hidden 768, layers 12,"),
        ("llama3.1", "--model llama3.1-70b: "),
        ("h200", 'device = "h200" in a cluster profile: 140.4 GiB; '),
        ("a100-80g-8", "hpc-gpt profile show a100-80g-8"),
        ("gpu_flag", 'in a cluster profile:\ngpu_flag  "gres"'),
        ("gpu_memory", "a run can end as gpu_memory: "),
        ("oom", "a run can end as host_memory: "),
        ("batch_size", "layout.global_batch "),
        ("learning-rate", "train.lr "),
        ("models", "--model smollm3-3b: "),
        ("mfu", "mfu of a record, for report --columns: "),
    ],
)
def test_any_word_finds_the_keys_and_names_that_have_it(word, shown):
    assert shown in in_process("help", word, code=0).stdout


def test_a_keys_last_part_is_a_key_and_json_has_keys():
    assert in_process("help", "keys", "lr", code=0).stdout == in_process("help", "lr", code=0).stdout
    (row,) = json.loads(in_process("help", "keys", "lr", "--json", code=0).stdout)["keys"]
    assert row["key"] == "train.lr"
    gone = error_of(in_process("help", "engines", "--json", code=2))
    assert gone == (
        "help engines --json is gone since 0.5",
        "hpc-gpt help engines lists them as text; help keys --json lists keys",
    )


@pytest.mark.parametrize("word", ["train.lr", "[train]", "train", "model.hidden"])
def test_a_key_or_a_table_is_a_topic(word):
    shown = in_process("help", word, code=0).stdout
    assert shown == in_process("help", "keys", word).stdout
    assert "Learning rate after the warm-up" in shown or word == "model.hidden"


# --- words that people type first, and values that come from somewhere else than the command line


@pytest.mark.parametrize("words", [("-V",), ("version",), ("--version",)])
def test_the_version(words):
    done = in_process(*words)
    assert (done.code, done.stdout) == (0, f"hpc-gpt {__version__}\n")


@pytest.mark.parametrize("verb", ["submit", "plan", "cancel"])
def test_help_of_a_verb(verb):
    assert in_process("help", verb).stdout == in_process(verb, "--help").stdout
    assert in_process("help", "engines").stdout.startswith("deepspeed-3d")


def test_a_key_that_is_set_twice_is_said():
    done = in_process("render", "demo", "--set", "train.steps=3", "--set", "train.lr=1e-3", "--set", "train.steps=4")
    assert "note: --set train.steps is given 2 times: train.steps=4 counts" in done.stderr
    assert "train.lr is given" not in done.stderr
    assert '"steps": 4' in done.stdout


@pytest.mark.parametrize("verb", ["cancel", "stop", "save", "requeue", "export", "why", "logs", "status"])
def test_the_empty_name_of_a_shells_unset_variable_is_no_run(verb):
    run = unsubmitted_run()
    done = in_process(verb, "")
    assert (done.code, done.stderr.splitlines()[0]) == (5, "Error: the name of a run is empty")
    assert not list(run.path.glob("cancelled.*"))
