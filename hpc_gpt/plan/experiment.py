"""The best layout of a search as an experiment's file, with the reasons as comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from hpc_gpt.plan.search import Candidate, Figures, Searched
from hpc_gpt.plan.table import candidate_texts, engine_text, figures_lines, heading, left_out_text, needs
from hpc_gpt.plan.training import engine_for
from hpc_gpt.settings.experiment import LR_OF_TRAINED, Engine, Experiment, Train
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.tables import set_dotted, toml_lines

# Layouts that are named beside the best one.
_OTHERS = 4
_KEYS_OF_LAYOUT = ("gpus", "tp", "pp", "dp", "micro_batch", "global_batch")
_ENDS = {
    "data": (
        "Python's own sources, for a first run. Your text: hpc-gpt data SOURCE makes a token file, then",
        'source = "tokens" and path = "FILE".',
    ),
    "train": (
        "How long, and how fast it learns; save_every or save_minutes say when it saves.",
        "hpc-gpt help keys train explains every key.",
    ),
}


def planned_tables(best: Candidate, experiment: Experiment, given: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of the experiment: what the user has `given`, by dotted key, and what the planner has chosen."""
    training = best.training
    tables: dict[str, Any] = {"model": {}, "data": {"source": experiment.data.source}}
    for key, value in given.items():
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
    """The file's text. `model` is the model's name and shape, `source` where the planner's constants are from."""
    best = searched.candidates[0]
    reasons = {
        "model": (f"{model[1].params:,} parameters.",),
        "engine": (f"{engine_text(best.training)}: the fastest here of the settings that fit.",),
        "layout": tuple(_layout_reasons(searched, figures, source)),
        **_ENDS,
    }
    if "init" in tables["train"]:
        lr = f"lr {LR_OF_TRAINED:g} is usual for weights that are trained already, {Train().lr:g} for random ones."
        reasons["train"] = (reasons["train"][0], lr, *reasons["train"][1:])
    lines = [f"# {heading(searched, *(model[0], model[1].params))}", "", *toml_lines({"name": name})]
    for table, keys in tables.items():
        if isinstance(keys, Mapping):
            lines += ["", f"[{table}]", *(f"# {reason}" for reason in reasons.get(table, ())), *toml_lines(keys)]
    return "\n".join(lines) + "\n"


def _layout_reasons(searched: Searched, figures: Figures, source: str) -> Iterator[str]:
    best = searched.candidates[0]
    training = best.training
    yield f"{best.layout}: {needs(best)}; {figures_lines(figures, training.gpus)[0]}."
    yield f"Predicted from {source}; the range is the prediction's error."
    batch = f"{training.micro_batch} x {training.micro_batches} micro-batches x dp {training.dp}"
    yield f"A step has {batch} = {training.global_batch} samples."
    others = searched.best_of_layouts[1 : 1 + _OTHERS]
    if others:
        yield "Against the best, the next layouts lose:"
    for other in others:
        texts = candidate_texts(other, best)
        yield f"  {texts['layout']} on {texts['engine']}, {texts['step']} s, {texts['memory']} GiB: {texts['why']}"
    if words := left_out_text(searched):
        yield f"{words[0].upper()}{words[1:]}."
