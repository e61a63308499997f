"""The engines: one module per engine, with an `ENGINE`. A new module is found by being here; its file gives its name.

`base` has what they share.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

from hpc_gpt.core.engines.base.ds_config import DS_CONFIG
from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.engines.base.training import States, Training
from hpc_gpt.core.settings.resolved import Resolved


@cache
def engines() -> dict[str, EngineFacts]:
    """Every engine by name, in the order of lists."""
    unsorted = [engine_named(module.name) for module in pkgutil.iter_modules(__path__) if not module.ispkg]
    return {facts.name: facts for facts in sorted(unsorted, key=lambda facts: (facts.order, facts.name))}


@cache
def engine_named(name: str) -> EngineFacts:
    """The engine of that name; an experiment's name always exists (`core.settings.services.EngineName`). The others
    are not imported."""
    facts: EngineFacts = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").ENGINE
    return facts


def trainers() -> dict[str, EngineFacts]:
    """The engines that train a model that we know: all except a user's own program."""
    return {name: facts for name, facts in engines().items() if not facts.takes_command}


def engine_of(training: Training) -> EngineFacts:
    """The engine of a training."""
    return engine_named(training.engine)


def ds_config_of(resolved: Resolved) -> dict[str, Any]:
    """The configuration for DeepSpeed, which the run folder has as ds_config.json."""
    config: dict[str, Any] = engine_named(resolved.engine.name).config_files(resolved)[DS_CONFIG]
    return config


def states_of(training: Training) -> States:
    """Who counts the bytes per parameter: `program_states` of another program, else our engine."""
    states: States = training.program_states or engine_of(training)
    return states
