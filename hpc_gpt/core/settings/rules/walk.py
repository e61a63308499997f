"""The two lists of rules: those that need no decision, and those of what was decided; and the faults that they find.

A fault that only follows from another is left out: one that reads a key which has a fault already.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import Fault, gathered
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Data, Experiment, LayoutRequest
from hpc_gpt.core.settings.key_rules import number_faults
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model import stated_shape
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.rules import TABLES, keys_of
from hpc_gpt.core.settings.rules.data import data_faults
from hpc_gpt.core.settings.rules.engine import engine_shape_faults, run_faults, table_faults
from hpc_gpt.core.settings.rules.job import service_faults
from hpc_gpt.core.settings.rules.shape import shape_faults, size_faults
from hpc_gpt.core.settings.schedule import excess_of
from hpc_gpt.core.settings.shape_split import expert_faults
from hpc_gpt.core.settings.sized import Sized

_ALL_KEYS = "hpc-gpt help keys lists every key"
_Rule = Callable[[Experiment, ClusterProfile], Iterator[Fault]]


def faults_before(experiment: Experiment, profile: ClusterProfile, found: Sequence[Fault] = ()) -> list[Fault]:
    """The faults that need no decision, with those `found` before, in the order of the tables."""
    faults, sound = [*found], experiment
    for rules, reads in _BEFORE:
        of_rules = [fault for rule in rules for fault in rule(sound, profile)]
        faults += without_followers(of_rules, faults, reads)
        sound = sound_part(experiment, faults)
    places = {name: place for place, name in enumerate(TABLES)}
    return sorted(faults, key=lambda fault: places.get(next(iter(keys_of(fault)), "").partition(".")[0], len(places)))


def faults_after(run: Sized) -> list[Fault]:
    """The faults of what was decided."""
    return [*run_faults(run), *engine_named(run.engine.name).sized_faults(run)]


def without_followers(
    faults: Iterable[Fault], found: Sequence[Fault], reads: Sequence[str] = (), of_layout: Sequence[str] = ()
) -> Iterator[Fault]:
    """The faults that read no key of those `found` before. All of them read the keys `reads`; those of the layout also
    `of_layout`."""
    faulty = {key for fault in found for key in keys_of(fault)}
    for fault in faults:
        keys = (*keys_of(fault), *reads, *(of_layout if fault.of_layout else ()))
        # A table has the keys that begin with it.
        pairs = ((f"{one}.", f"{other}.") for one in faulty for other in keys)
        if not any(one.startswith(other) or other.startswith(one) for one, other in pairs):
            yield fault


def sound_part(experiment: Experiment, found: Sequence[Fault]) -> Experiment:
    """The experiment with the default of every key that has a fault."""
    for key in {key for fault in found for key in keys_of(fault)}:
        table, _, name = key.partition(".")
        if table == "model":  # the other rules need some model
            experiment = replace(experiment, model=Model(preset="gpt2"))
        elif key.startswith("data.mix."):  # a source alone says nothing
            experiment = replace(experiment, data=Data())
        elif table in TABLES:
            default = type(getattr(experiment, table))()
            name = name.partition(".")[0]
            changed = default if not name else getattr(experiment, table)
            if name in TABLES[table]:  # an unknown key is in no table
                changed = replace(changed, **{name: getattr(default, name)})
            experiment = replace(experiment, **{table: changed})
    return experiment


def _numbers(experiment: Experiment, profile: ClusterProfile) -> Iterator[Fault]:
    yield from size_faults(experiment.model)
    for fault in number_faults("layout", experiment.layout, "give a number of at least 1"):
        yield fault._replace(of_layout=True)
    train = experiment.train
    of_program = engine_named(experiment.engine.name).takes_command and not train.steps  # these may be unknown
    yield from number_faults("train", train, _ALL_KEYS, ("steps",) if of_program else ())
    yield from number_faults("job", experiment.job, _ALL_KEYS)
    yield from number_faults("data", experiment.data, _ALL_KEYS)


def _model(experiment: Experiment, profile: ClusterProfile) -> Iterator[Fault]:
    """The faults of the model's shape. With them come those of the engine and of ep, for a mixture."""
    if experiment.model == Model() and engine_named(experiment.engine.name).takes_command:
        return
    faults, shape = list[Fault](), None
    with gathered(faults):
        shape = stated_shape(experiment.model)
    if shape is not None and (of_shape := shape_faults(shape)):
        faults += of_shape
        faults += engine_shape_faults(experiment.engine, shape) if shape.is_mixture else ()
        faults += _requested_ep_faults(experiment.layout, shape, profile)
    yield from (fault._replace(keys=keys_of(fault) or ("model",)) for fault in faults)


def _requested_ep_faults(request: LayoutRequest, shape: ModelShape, profile: ClusterProfile) -> list[Fault]:
    """The faults of the requested ep, for a shape with faults of its own."""
    tp, pp, cp = request.tp or 1, request.pp or 1, request.cp or 1
    gpus = request.gpus or (request.nodes or 1) * profile.gpus_per_node
    if (ep := request.ep or 1) == 1 or (shape.experts or 1) < 1:
        return []
    dp = max(1, request.dp or gpus // (tp * pp * cp))
    return list(expert_faults(shape, Layout(tp, pp, dp, cp, ep)))


def _train(experiment: Experiment, profile: ClusterProfile) -> Iterator[Fault]:
    train = experiment.train
    if train.steps and (excess := excess_of(train)):
        yield Fault(excess, "use a shorter warm-up or decay, or more train.steps")
    if train.eval_every > 0 and not train.eval_batches:
        yield Fault("train.eval_batches is 0, but must be at least 1 if train.eval_every is not 0", _ALL_KEYS)
    if early := [at for at in (*train.save_at, *train.profile_steps) if at < 1]:
        yield Fault(f"step {early[0]} of train.save_at or train.profile_steps must be at least 1", _ALL_KEYS)
    if train.profile_steps and (len(train.profile_steps) != 2 or train.profile_steps[0] > train.profile_steps[1]):
        listed = list(train.profile_steps)
        yield Fault(f"train.profile_steps is {listed}, but must be [first step, last step]", _ALL_KEYS)


# The rules that need no decision, in groups, and the keys that all rules of a group read. A rule is left out if a group
# before it has a fault of a key that it reads.
_BEFORE: tuple[tuple[tuple[_Rule, ...], tuple[str, ...]], ...] = (
    ((_numbers,), ()),
    ((_model, _train), ()),
    ((table_faults,), ("engine.name",)),
    ((data_faults,), ()),
    ((service_faults,), ("engine.name",)),
)
