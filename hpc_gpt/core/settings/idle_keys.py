"""Keys of an experiment that have no effect because of other keys. They get a note; contradictions are refused
elsewhere."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.settings.experiment import Data, Engine, Job, Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.services import After
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.core.tables import toml_value

# Without [layout]: a run has only the resolved layout, not the request.
_DEFAULTS = {"data": Data(), "engine": Engine(), "train": Train(), "job": Job(), "after": After()}


@dataclass(frozen=True)
class _Rule:
    """`keys` have no effect if `why` gives a reason for the settings; it gives an empty text if they have one."""

    keys: tuple[str, ...]
    why: Callable[[Sized], str]


def _saves_nothing(sized: Sized) -> str:
    train = sized.train
    saves = train.save_every or train.save_minutes or train.save_at or train.save_last
    return "" if saves else "train.save_last is false and no other key saves"


def _is_of_program(sized: Sized, then: str) -> str:
    """The reason that another program trains, followed by `then`; empty if our code trains."""
    ours = engine_named(sized.engine.name).writes_metrics
    return "" if ours else f"engine {sized.engine.name} is another program{then}"


def _is(key: str, value: Any, then: str = "") -> Callable[[Sized], str]:
    """A function that gives the reason that another key has a value, followed by `then`."""
    table, _, name = key.partition(".")

    def why(sized: Sized) -> str:
        return f"{key} is {toml_value(value)}{then}" if getattr(getattr(sized, table), name) == value else ""

    return why


def _is_not(key: str, value: Any, then: str) -> Callable[[Sized], str]:
    table, _, name = key.partition(".")

    def why(sized: Sized) -> str:
        other = getattr(getattr(sized, table), name)
        return "" if other == value else f"{key} is {toml_value(other)}{then}"

    return why


_RULES = (
    _Rule(
        tuple(f"train.{name}" for name in (
            "tf32", "optimizer_mode", "save_in_background", "max_bad_steps",
        )),
        lambda sized: _is_of_program(sized, ", which does not receive it"),
    ),
    _Rule(("engine.cp_exchange",), lambda sized: "" if sized.layout.cp > 1 else "cp is 1: nothing is exchanged"),
    _Rule(("data.workers", "data.on_bad_shard"), _is_not("data.source", "stream", "; only a stream uses it")),
    _Rule(("data.tokenizer", "data.eval_fraction", "data.max_epochs"), _is("data.source", "random", ": no text")),
    _Rule(("train.eval_batches",), _is("train.eval_every", 0, ": nothing is evaluated")),
    _Rule(("train.min_lr",), _is("train.decay", "constant")),
    _Rule(("train.decay_steps", "train.decay_shape"), _is_not("train.decay", "wsd", "; these keys belong to wsd")),
    _Rule(
        ("train.weight_decay", "train.beta1", "train.beta2", "train.eps"),
        _is("train.optimizer", "sgd", ", which has none of them"),
    ),
    _Rule(
        ("train.balance_coef", "train.balance_rate"),
        lambda sized: _is_of_program(sized, ", which does not receive it"),
    ),
    _Rule(("train.balance_coef",), _is_not("train.balance", "loss", ": no balance loss")),
    _Rule(("train.balance_rate",), _is_not("train.balance", "bias", ": no bias moves")),
    _Rule(("train.keep_every",), _is("train.keep_last", 0, ": every checkpoint stays")),
    _Rule(("train.keep_last", "train.save_in_background"), _saves_nothing),
    _Rule(("train.hang_floor_s",), _is("train.hang_multiple", 0, ": nothing is a hang")),
    _Rule(("train.tf32",), _is_not("train.dtype", "fp32", ", and so are its products")),
    _Rule(("engine.compile_backend",), _is("engine.compile", "none")),
    _Rule(
        ("engine.prefetch", "engine.reshard", "engine.gather_blocks"),
        lambda sized: "" if sized.layout.data_ranks > 1 else "the weights are not sharded: dp is 1",
    ),
    _Rule(("after.run",), _saves_nothing),
    _Rule(
        ("layout.allow_tp_across_nodes",),
        lambda sized: "" if sized.layout.tp > sized.ranks_per_node else f"tp {sized.layout.tp} is within a node",
    ),
)  # fmt: skip


def idle_keys(sized: Sized, stated: Collection[str]) -> Iterator[str]:
    """A line per reason, with the `stated` keys that have no effect because of it, if their values are not the
    defaults."""
    if _takes_nothing_of_preset(sized, stated):
        yield "model.preset has no effect: every size that it sets is also given"
    left = [key for rule in _RULES for key in rule.keys if key in stated and _is_changed(sized, key)]
    for rule in _RULES:
        keys = [key for key in rule.keys if key in left]
        if keys and (why := rule.why(sized)):
            left = [key for key in left if key not in keys]
            yield f"{' and '.join(keys)} {'have' if keys[1:] else 'has'} no effect: {why}"


def _is_changed(sized: Sized, key: str) -> bool:
    table, _, name = key.partition(".")
    return table not in _DEFAULTS or bool(getattr(getattr(sized, table), name) != getattr(_DEFAULTS[table], name))


def _takes_nothing_of_preset(sized: Sized, stated: Collection[str]) -> bool:
    """Whether every size and kind in which the preset differs from GPT-2's shape is also stated itself."""
    if sized.preset is None or "model.preset" not in stated:
        return False
    shape, left = preset(sized.preset), [entry for entry in fields(ModelShape) if f"model.{entry.name}" not in stated]
    return all(entry.default is not MISSING and getattr(shape, entry.name) == entry.default for entry in left)
