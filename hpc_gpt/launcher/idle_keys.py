"""Keys of an experiment that have no effect because of other keys. They get a note; contradictions are refused
elsewhere."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, fields
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.optimizers import optimizer_named
from hpc_gpt.core.settings.experiment import Data, Engine, Job, Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.core.tables import toml_value

# Without [layout]: a run has only the resolved layout, not the request.
_DEFAULTS = {"data": Data(), "engine": Engine(), "train": Train(), "job": Job()}


def _saves_nothing(sized: Sized) -> str:
    train = sized.train
    saves = train.save_every or train.save_minutes or train.save_at or train.save_last
    return "" if saves else "train.save_last is false and no other key saves"


def _is_of_program(sized: Sized) -> str:
    """The reason that another program trains; empty if our code trains."""
    ours = engine_named(sized.engine.name).writes_metrics
    return "" if ours else f"engine {sized.engine.name} is another program, which does not receive it"


def _is(key: str, value: Any, then: str = "", but: bool = False) -> Callable[[Sized], str]:
    """A function that gives the reason that another key has a value, or another one (`but`), followed by `then`."""
    table, _, name = key.partition(".")

    def why(sized: Sized) -> str:
        other = getattr(getattr(sized, table), name)
        return f"{key} is {toml_value(other)}{then}" if (other == value) is not but else ""

    return why


# (keys, why they have no effect in a run: a function that gives an empty text if they have one)
_RULES: tuple[tuple[tuple[str, ...], Callable[[Sized], str]], ...] = (
    (("train.tf32", "train.optimizer_mode", "train.save_in_background", "train.max_bad_steps"), _is_of_program),
    (("engine.cp_exchange",), lambda sized: "" if sized.layout.cp > 1 else "cp is 1: nothing is exchanged"),
    (("data.workers", "data.on_bad_shard"), _is("data.source", "stream", "; only a stream uses it", but=True)),
    (("data.tokenizer", "data.eval_fraction", "data.max_epochs"), _is("data.source", "random", ": no text")),
    (("train.eval_batches",), _is("train.eval_every", 0, ": nothing is evaluated")),
    (("train.min_lr",), _is("train.decay", "constant")),
    (("train.decay_steps", "train.decay_shape"), _is("train.decay", "wsd", "; these keys belong to wsd", but=True)),
    (("train.balance_coef", "train.balance_rate"), _is_of_program),
    (("train.balance_coef",), _is("train.balance", "loss", ": no balance loss", but=True)),
    (("train.balance_rate",), _is("train.balance", "bias", ": no bias moves", but=True)),
    (("train.keep_every",), _is("train.keep_last", 0, ": every checkpoint stays")),
    (("train.keep_last", "train.save_in_background"), _saves_nothing),
    (("train.hang_floor_s",), _is("train.hang_multiple", 0, ": nothing is a hang")),
    (("train.tf32",), _is("train.dtype", "fp32", ", and so are its products", but=True)),
    (("engine.compile_backend",), _is("engine.compile", "none")),
    (
        ("engine.prefetch", "engine.reshard", "engine.gather_blocks"),
        lambda sized: "" if sized.layout.data_ranks > 1 else "the weights are not sharded: dp is 1",
    ),
    (
        ("layout.allow_tp_across_nodes",),
        lambda sized: "" if sized.layout.tp > sized.ranks_per_node else f"tp {sized.layout.tp} is within a node",
    ),
)  # fmt: skip


def idle_keys(sized: Sized, stated: Collection[str]) -> Iterator[str]:
    """A line per reason, with the `stated` keys that have no effect because of it, if their values are not the
    defaults."""
    if _takes_nothing_of_preset(sized, stated):
        yield "model.preset has no effect: every size that it sets is also given"
    rules = (*_RULES, _of_other_optimizers(sized))
    left = [key for keys, _ in rules for key in keys if key in stated and _is_changed(sized, key)]
    for of_rule, why_of in rules:
        keys = [key for key in of_rule if key in left]
        if keys and (why := why_of(sized)):
            left = [key for key in left if key not in keys]
            yield f"{' and '.join(keys)} {'have' if keys[1:] else 'has'} no effect: {why}"


def _of_other_optimizers(sized: Sized) -> tuple[tuple[str, ...], Callable[[Sized], str]]:
    """The rule of AdamW's keys that the run's optimizer has not. One that is another's alone is refused elsewhere."""
    name = sized.train.optimizer
    others = sorted(optimizer_named("adamw").keys - optimizer_named(name).keys)
    return tuple(f"train.{key}" for key in others), lambda _: f'train.optimizer is "{name}", which has no such key'


def _is_changed(sized: Sized, key: str) -> bool:
    table, _, name = key.partition(".")
    return table not in _DEFAULTS or bool(getattr(getattr(sized, table), name) != getattr(_DEFAULTS[table], name))


def _takes_nothing_of_preset(sized: Sized, stated: Collection[str]) -> bool:
    """Whether every size and kind in which the preset differs from GPT-2's shape is also stated itself."""
    if sized.preset is None or "model.preset" not in stated:
        return False
    shape, left = preset(sized.preset), [entry for entry in fields(ModelShape) if f"model.{entry.name}" not in stated]
    return all(entry.default is not MISSING and getattr(shape, entry.name) == entry.default for entry in left)
