"""One layout explained: line by line with its arithmetic (`plan --why`), or as an experiment's file with the reasons as
comments (`init`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hpc_gpt.core.columns import Grid, filled
from hpc_gpt.core.engines import engine_of, states_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.format import NOTHING, wrapped
from hpc_gpt.core.recomputation import modules_of, recomputation
from hpc_gpt.core.settings.experiment import LR_OF_TRAINED, Engine, Experiment, Train
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.shape_split import outer_params
from hpc_gpt.core.tables import set_dotted, toml_lines
from hpc_gpt.planner import experts
from hpc_gpt.planner.constants import constant_lines
from hpc_gpt.planner.figures import Figures, arithmetic, memory_text, peak_memory_text, plan_figures, summary
from hpc_gpt.planner.layer_bytes import kept_of_layer, layer_bytes, mlp_width
from hpc_gpt.planner.links import Links
from hpc_gpt.planner.machine import DEFAULT, Machine, generation_of
from hpc_gpt.planner.memory import (
    in_flight,
    kinds_of_stages,
    layers_of_stages,
    over_kinds,
    stage_expert_params,
    stage_params,
)
from hpc_gpt.planner.search import Candidate, Searched
from hpc_gpt.planner.table import (
    PARTS,
    STAGE_COLUMNS,
    PlanRow,
    does_not_fit,
    engine_text,
    heading,
    left_out_text,
)
from hpc_gpt.planner.training import engine_for


def explain_plan(
    candidate: Candidate,
    machine: Machine,
    figures: Figures | None,
    others: Sequence[Candidate] = (),
    source: str = "data sheets",
) -> str:
    """The text of `plan --why`. `figures` is None if it does not fit; `others` has the best of each micro-batch;
    `source` says where the constants come from."""
    table = constant_lines(machine.device, generation_of(machine))
    about = (
        f"constants, from {source}; a profile's [calibration] replaces them, and --calibrate fits it. Machines with "
        "the same device differ, most of all V100 and nodes on EFA: four of five published steps are within the range."
    )
    lines = [*_lines(candidate, machine, figures), "", *wrapped(about, _WIDTH), *table]
    return "\n".join([*lines, *_micro_batches(candidate, others)]) + "\n"


def _micro_batches(candidate: Candidate, others: Sequence[Candidate]) -> Iterator[str]:
    if len(others) < 2:
        return
    lines = []
    for other in others:
        run, figures = other.training, plan_figures(other)
        mark = "*" if run.micro_batch == candidate.training.micro_batch else ""
        time = figures["step"].digits if other.step else NOTHING
        text = engine_text(run) if other.step else f"{engine_text(run)}: {does_not_fit(other)}"
        lines.append([f"{run.micro_batch}{mark}", str(run.micro_batches), figures["memory"].digits, time, text])
    yield "\nevery micro-batch, each with its best settings"
    yield Grid(["size", "number", "GiB", "step s", ""], [True, True, True, True, False], lines).aligned().rstrip("\n")


def _lines(candidate: Candidate, machine: Machine, figures: Figures | None) -> Iterator[str]:
    run = candidate.training
    yield f"{candidate.layout} on {run.gpus} {machine.device}, engine {engine_text(run)}"
    yield ""
    axes = " x ".join(f"{axis} {getattr(run, axis)}" for axis in AXES if axis != "cp" or run.cp > 1)
    yield f"GPUs         {axes} = {run.gpus}"
    yield (
        f"batch        micro-batch {run.micro_batch} x {run.micro_batches} micro-batches x dp {run.dp} = "
        f"{run.global_batch} samples of {run.shape.seq} tokens = {run.global_batch * run.shape.seq:,} tokens a step"
    )
    yield f"layers       {_layers(run)}"
    if run.shape.windowed:
        yield f"windows      {_windows(run)}"
    yield f"tensors      {_widths(run)}"
    yield f"parameters   {_parameters(run, candidate.memory.deciding)}"
    yield f"states       {_states(run)}"
    yield f"activations  {_activations(run, candidate.memory.deciding)}"
    if run.shape.is_mixture:
        yield from _experts(run, machine)
    yield ""
    yield f"memory of one GPU, GiB; nvidia_smi must be below the card's {machine.memory_gib:.4g}"
    yield _memory(candidate)
    if candidate.step is None:
        yield does_not_fit(candidate)
    else:
        tight = ": tight, because less is left than the prediction may err by" if candidate.is_tight else ""
        yield f"needs {memory_text(candidate)}{tight}"
    if candidate.step is not None and figures is not None:
        yield ""
        yield "time of a step"
        yield _time(candidate)
        yield ""
        yield from arithmetic(plan_figures(candidate, figures))


def _layers(run: Training) -> str:
    blocks = layers_of_stages(run)
    dense = f", of which the first {run.shape.dense_layers} are dense" if run.shape.dense_layers else ""
    if run.pp == 1:
        return f"all {run.shape.layers} on every GPU{dense}"
    most, least = max(blocks), min(blocks)
    per_stage = f"{most} a stage" if most == least else f"{least} to {most} a stage"
    chunks = f", in {run.vp} chunks" if run.vp > 1 else ""
    return (
        f"{run.shape.layers}{dense} over {run.pp} stages: {per_stage}{chunks}; embedding on the first, head on the last"
    )


def _windows(run: Training) -> str:
    shape = run.shape
    full = [
        sum(count for count, kind in zip(counts, shape.kinds, strict=True) if kind.window is None)
        for counts in kinds_of_stages(run)
    ]
    text = f"{shape.windowed} layers attend to {shape.window:,} tokens, {shape.layers - shape.windowed} to all"
    if min(full) == max(full):
        return text
    return f"{text}: stage {full.index(max(full))}, which has {max(full)} of these, is slower than one with {min(full)}"


def _widths(run: Training) -> str:
    shape = run.shape
    width = max(map(mlp_width, shape.kinds))  # 0 if every layer has nothing but experts
    if run.tp == 1:
        mlp = f" MLP {width}," if width else ""
        return f"hidden {shape.hidden},{mlp} {shape.heads} heads, whole on every GPU"
    mlp = f"MLP {width} / {run.tp} = {width // run.tp}, " if width else ""
    return (
        f"over tp {run.tp}: hidden {shape.hidden} / {run.tp} = {shape.hidden // run.tp}, {mlp}"
        f"heads {shape.heads} / {run.tp} = {shape.heads // run.tp}, vocabulary "
        f"{shape.padded_vocab} / {run.tp} = {shape.padded_vocab // run.tp}"
    )


def _parameters(run: Training, stage: int) -> str:
    outside, counts = outer_params(run.shape, run.tp, run.pp, stage), kinds_of_stages(run)[stage]
    layers: dict[str, tuple[int, float]] = {}  # {name of a kind: its layers, with a window or not; parameters of one}
    for count, kind, (each, _) in zip(counts, run.shape.kinds, run.params_of_kinds, strict=True):
        layers[kind.name] = (layers.get(kind.name, (0, 0.0))[0] + count, each)
    kinds = [
        f"{count}{f' {name}' * (len(layers) > 1)} layers x {each / 1e6:,.2f}e6"
        for name, (count, each) in layers.items()
        if count or len(layers) == 1
    ]
    outer_text = f" + {outside / 1e6:,.1f}e6 outside them" if outside else ""
    later = f" + {run.shape.mtp_layers} MTP" if run.shape.mtp_layers and stage == run.pp - 1 else ""
    total = stage_params(run, stage) / 1e6
    return f"stage {stage}: {' + '.join(kinds)}{outer_text}{later} = {total:,.1f}e6 on one GPU"


def _experts(run: Training, machine: Machine) -> Iterator[str]:
    """Lines on the experts of a mixture: their split, rows, states, activations, dispatch, passes and launches."""
    shape, local = run.shape, experts.local_experts(run)
    width = (shape.expert_ffn or 0) // run.expert_tp
    shared = f", over etp {run.expert_tp}" if run.expert_tp > 1 else ""
    yield (
        f"experts      {shape.experts} a layer over ep {run.ep} = {local:g} on one GPU{shared}, each {shape.hidden} x "
        f"{width}; {run.expert_replicas} replicas share gradients and states, all else {run.data_ranks}"
    )
    load = experts.worst_load(run)
    balance = f"{load:g} times the mean where most tokens go" if load > 1 else "the mean, as ranks have equally many"
    yield (
        f"rows         {run.tokens} tokens x {shape.experts_per_token} experts: {experts.rows_an_expert(run):,.0f} an "
        f"expert, {balance}"
    )
    state = states_of(run).state_bytes(run.of_experts)
    total = state.parameters + state.optimizer + max(state.gradients, state.step_gradients)
    of_experts = stage_expert_params(run, 0)
    yield f"             states of experts: {total:.3g} bytes x {of_experts / 1e6:,.1f}e6 on a GPU of stage 0"
    copies = experts.expert_rows(run) * (2 * shape.hidden + 6 * width) / 2**20
    yield f"             a layer's rows, {shape.hidden} wide before an expert and {width} inside: {copies:,.1f} MiB"
    ranks, links = run.ep * run.expert_tp, Links(machine, DEFAULT)
    seconds = experts.exchange_s(run, links)
    inside = ranks <= links.per_node
    where = f"inside {links.per_node} GPUs joined by NVLink" if inside else f"across nodes of {links.per_node} GPUs"
    if run.ep > 1:
        kept, leaving = experts.copies_sent(run, links)
        what = "every rank gathers all tokens" if run.dispatcher == "allgather" else (
            f"{kept:.2g} copies of a token go to its node, {leaving:.2g} to others"
        )  # fmt: skip
        hidden = ", beside another micro-batch's passes" if run.ep_overlap else ""
        yield (
            f"dispatch     {experts.dispatcher_of(run)}, {where}: {what}; {1e3 * seconds:.3g} ms a layer and "
            f"micro-batch{hidden}"
        )
    again = 1 if experts.sorts_once(run) else 2
    yield f"permutation  {again} before and {again} after the experts, and a router of {shape.hidden} x {shape.experts}"
    waits = ", which waits for the router" if experts.waits_for_router(run) else ""
    launching_ms = 1e3 * experts.launching_s(run, DEFAULT.host_s)
    yield (
        f"launches     {launching_ms:.3g} ms of the host a layer and pass for router, dispatch and {local:g} "
        f"experts{waits}"
    )
    if engine_of(run).sharding(run) >= 3 and run.expert_replicas > 1:
        gathered = 2 * run.params_of_kinds[-1][1] / 1e9
        yield f"             a layer's experts are gathered whole: {gathered:.3g} GB in 16 bits"


def _states(run: Training) -> str:
    """The line on the bytes per parameter on one GPU."""
    state = states_of(run).state_bytes(run)
    step = f" ({state.step_gradients:.3g} in the step)" if state.step_gradients != state.gradients else ""
    total = state.parameters + state.optimizer + max(state.gradients, state.step_gradients)
    host = f", {state.host:.3g} on the host" if state.host else ""
    return (
        f"{states_of(run).rule(run)}: weights {state.parameters:.3g} + gradients {state.gradients:.3g}{step} + "
        f"optimizer {state.optimizer:.3g} = {total:.3g} bytes a parameter{host}"
    )


def _activations(run: Training, stage: int) -> str:
    flying, layers = in_flight(run, stage), layers_of_stages(run)[stage]
    kinds = run.shape.kinds
    kept = [kept_of_layer(run, layer_bytes(run, kind)) / 2**20 for kind in kinds]
    total = over_kinds(flying, kinds_of_stages(run)[stage], kept) / 1024
    layer_mib = kept[-1] if len(kept) == 1 else total * 1024 / flying / layers
    schedule = f"min({run.micro_batches}, pp {run.pp} - {stage})" if run.pp > 1 else "1"
    extra = " plus the chunks'" if run.vp > 1 else ""
    where = ", on the host" if run.activations_on_host else ""
    return (
        f"stage {stage}: {schedule}{extra} = {flying:.3g} micro-batches in flight x {layers} layers x "
        f"{layer_mib:,.1f} MiB = {total:.2f} GiB{where}"
    )


def _memory(candidate: Candidate) -> str:
    stages = candidate.memory.stages
    shown = sorted({0, candidate.memory.deciding, len(stages) // 2, len(stages) - 1})
    lines = [
        [column.heading, *(column.show(stages[place]) for place in shown)] for column in filled(STAGE_COLUMNS, stages)
    ]
    headings = ["", *(f"stage {place}" + "*" * (place == candidate.memory.deciding) for place in shown)]
    return Grid(headings, [False, *(True for _ in shown)], lines).aligned().rstrip("\n")


def _time(candidate: Candidate) -> str:
    step, run = candidate.step, candidate.training
    assert step is not None
    lines = []
    for part in PARTS:
        seconds = getattr(step, part.field)
        if seconds:
            lines.append([part.name, f"{seconds:.4g}", f"{100 * seconds / step.step_s:.1f}", _how(part.name, run)])
    lines.append(["step", f"{step.step_s:.4g}", "100.0", str(plan_figures(candidate)["band"])])
    return Grid(["", "s", "%", ""], [False, True, True, False], lines).aligned().rstrip("\n")


def _how(part: str, run: Training) -> str:
    if part == "bubble":
        ideal = (run.pp - 1) / (run.micro_batches * run.vp)
        below = f"{run.micro_batches} micro-batches"
        below = f"({below} x {run.vp} chunks)" if run.vp > 1 else below
        return f"(pp {run.pp} - 1) / {below} = {100 * ideal:.1f} % of the busy time, and uneven stages"
    if part == "compute":
        return f"{run.micro_batches} micro-batches, forward and backward"
    if part == "recompute":
        again = recomputation(run.recompute)
        if modules_of(run.recompute):
            return f"{', '.join(modules_of(run.recompute))} again"
        whole = "the forward pass" + (f" of {run.recompute} of the layers" if again.share < 1 else "")
        return f"{whole} again" if again.share else "attention's scores again"
    if part == "tp":
        passes = "gather and scatter" if run.sequence_parallel else "all-reduce"
        return (
            f"{passes} of {run.shape.seq} x {run.micro_batch} x {run.shape.hidden} twice a layer and pass, tp {run.tp}"
        )
    if part == "ep":
        times = 4 + 2 * recomputation(run.recompute).repeats("moe")
        sent = f"{run.shape.experts_per_token} x {experts.sent_tokens(run):.0f} rows"
        return f"{times:g} exchanges a layer and micro-batch of {sent}"
    if part == "dp":
        gathered = "; parameters gathered for each pass" if engine_of(run).sharding(run) == 3 else ""
        shared = f"{run.data_ranks} ranks, cp x dp" if run.cp > 1 else f"{run.dp} replicas"
        if run.shard:
            shared = f"{run.shard} ranks that shard, and once a step over their {run.data_ranks // run.shard} replicas"
        shared += f", experts' over {run.expert_replicas}" if run.shape.is_mixture else ""
        return f"gradients over {shared}, the part that backward does not hide{gathered}"
    return next(step_part.means for step_part in PARTS if step_part.name == part)


_WIDTH = 120
# The number of layouts that are named after the best one.
_OTHERS = 4
_KEYS_OF_LAYOUT = ("gpus", "tp", "pp", "cp", "dp", "ep", "etp", "shard", "micro_batch", "global_batch")
_ENDS = {
    "data": (
        "Python's own sources as bytes, 256 different tokens, for a first run. For your text hpc-gpt data SOURCE",
        "--tokenizer TOKENIZER.JSON makes a token file with the model's tokenizer; then set",
        'source = "tokens", path = "FILE" and tokenizer = "TOKENIZER.JSON".',
    ),
    "train": (
        "Length and learning rate; save_every or save_minutes say when it saves.",
        "hpc-gpt help keys train explains every key.",
    ),
}


def planned_tables(best: Candidate, experiment: Experiment, given_keys: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of the experiment: `given_keys`, the user's values by dotted key, and the planner's choice."""
    training = best.training
    tables: dict[str, Any] = {"model": {}, "data": {"source": experiment.data.source}}
    for key, value in given_keys.items():
        if value is not None and not key.startswith("engine."):
            set_dotted(tables, key, value)
    engine, plain = engine_for(training, experiment.engine), Engine()
    chosen = {entry.name: getattr(engine, entry.name) for entry in fields(Engine)}
    tables["engine"] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in chosen.items()
        if value is not None and (name in ("name", "zero_stage", "recompute") or value != getattr(plain, name))
    }
    layout = tables.pop("layout", {})
    for name in _KEYS_OF_LAYOUT:
        layout[name] = getattr(training, name)
    for name, usual in (("cp", 1), ("ep", 1), ("etp", None), ("shard", None)):
        if layout[name] == usual:
            del layout[name]
    tables["layout"] = {name: size for name, size in layout.items() if name != "micro_batches"}
    lr = experiment.train.lr if experiment.train.init is None else LR_OF_TRAINED
    train = {"steps": experiment.train.steps, "lr": lr}
    tables["train"] = train | tables.pop("train", {}) | {"dtype": training.dtype}
    return tables


def planned_text(
    name: str,
    tables: Mapping[str, Any],
    searched: Searched,
    figures: Figures,
    model: tuple[str, ModelShape],
    source: str,
) -> str:
    """The file's text. `model` is the model's name and shape, `source` where the planner's constants come from."""
    best = searched.candidates[0]
    reasons = {
        "model": (f"{model[1].params:,} parameters.",),
        "engine": (f"{engine_text(best.training)}: the fastest settings that fit.", *_hidden(best)),
        "layout": tuple(_layout_reasons(searched, figures, source)),
        **_ENDS,
    }
    if "init" in tables["train"]:
        lr = f"lr {LR_OF_TRAINED:g} is usual for trained weights, {Train().lr:g} for random ones."
        reasons["train"] = (reasons["train"][0], lr, *reasons["train"][1:])
    lines = [f"# {heading(searched, *(model[0], model[1].params))}", "", *toml_lines({"name": name})]
    for table, keys in tables.items():
        if isinstance(keys, Mapping):
            lines += ["", f"[{table}]", *(f"# {reason}" for reason in reasons.get(table, ())), *toml_lines(keys)]
    return "\n".join(lines) + "\n"


def _hidden(best: Candidate) -> Iterator[str]:
    arguments, _ = engine_of(best.training).overlaps(best.training)
    if arguments:
        yield "To hide communication, add to megatron_args, if the checkout has them:"
        yield ", ".join(f'"{argument}"' for argument in arguments)


def _layout_reasons(searched: Searched, figures: Figures, source: str) -> Iterator[str]:
    best = searched.candidates[0]
    training = best.training
    yield f"{best.layout}: {peak_memory_text(best)}; {summary(plan_figures(best, figures))[0]}."
    yield f"Predicted from {source}; the percentage is the prediction's expected error."
    batch = f"{training.micro_batch} x {training.micro_batches} micro-batches x dp {training.dp}"
    yield f"A step has {batch} = {training.global_batch} samples."
    others = searched.best_of_layouts[1 : 1 + _OTHERS]
    if others:
        yield "The next layouts, compared with the best:"
    for other in others:
        texts = PlanRow(other, best).texts
        yield f"  {texts['layout']} on {texts['engine']}, {texts['step']} s, {texts['memory']} GiB: {texts['why']}"
    if text := left_out_text(searched):
        yield f"{text[0].upper()}{text[1:]}."
