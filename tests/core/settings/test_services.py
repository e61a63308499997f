"""[notify] and [track]: what they refuse, and that they are no part of what a run is."""

from dataclasses import replace
from typing import Any

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.core.settings.services import SERVICES
from hpc_gpt.core.settings.stored import experiment_of, experiment_text
from hpc_gpt.launcher.descent import descend

PROFILE = load_profile("local")
ASKED = {
    "notify.command": "mail -s GPT me@example.org",
    "notify.on": ["first_step", "stopped"],
    "track.tensorboard": True,
    "track.wandb": "gpt",
    "track.mlflow": "gpt",
}


def run(**overrides: Any) -> Resolved:
    return resolve(load_experiment("demo", overrides), PROFILE)


def test_without_the_tables_a_run_is_written_as_ever():
    assert not any(f'"{name}"' in run().to_json() for name in SERVICES)
    assert not any(f"[{name}]" in experiment_text(run(), "") for name in SERVICES)


def test_with_the_tables_a_run_is_the_same_training():
    asked = run(**ASKED)
    assert config_hash(asked) == config_hash(run())
    assert Resolved.from_json(asked.to_json()) == asked
    assert resolve(experiment_of(asked), PROFILE) == asked
    assert replace(asked, **SERVICES) == run()


def test_a_resumption_may_change_the_tables():
    assert replace(descend(run(), ASKED, PROFILE, 5), name="demo") == run(**ASKED)
    assert descend(run(**ASKED), {"notify.command": "true"}, PROFILE, 5).notify.command == "true"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("notify.command", "", "notify.command is empty"),
        ("notify.command", [], "notify.command is empty"),
        ("notify.command", "curl -H 'Bearer 0123456789abcdefgh'", "what looks like a secret"),
        ("notify.on", ["end"], "did you mean ended?"),
        ("track.wandb", "", "track.wandb is empty"),
        ("track.mlflow", "yes", "track.mlflow is 'yes', but must name the experiment to send to"),
    ],
)
def test_a_value_without_sense_is_refused(key, value, words):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")) as refused:
        run(**(ASKED | {key: value}))
    assert refused.value.hint


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("notify.on", ["ended"], "no command"),
    ],
)
def test_a_key_without_the_one_it_needs_is_refused(key, value, words):
    with pytest.raises(ConfigError, match=words):
        run(**{key: value})
