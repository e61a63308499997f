"""The figures that follow from a record: rates, TFLOPs, shares of a peak, memory by a formula."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from hpc_gpt.core.formulas import (
    hfu,
    memory_seed003_gib,
    mfu,
    seed_factor,
    tflops_hardware,
    tflops_model,
    tflops_seed,
)
from hpc_gpt.core.recomputation import known_recompute, recomputation
from hpc_gpt.core.runs.record import Flag, Record
from hpc_gpt.core.settings.devices import DEVICES, peak_tflops
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.typed_tables import from_tables

# Figures by key: (value, source). A value of None has its reason as the source.
Figures = dict[str, tuple[float | None, str]]
# Sources of `tflops_model`: N, the weights that multiply a token, or P, all parameters, if N is not known.
MULTIPLIED = "(6 N + 12 L h s) s B / (t n 1e12), PaLM appendix B; N: weights that multiply a token"
_EVERY = "(6 P + 12 L h s) s B / (t n 1e12), PaLM appendix B"
_TABLES = 0.05  # share of GPT-2's parameters that are looked up or added: positions, biases, norms

_HEAVY = 1.15  # a mean above this many times the median shows periodic heavy steps, such as an optimizer's refresh
_FEW = 20
_BY_MEAN = "global_batch x seq / step_s_mean"


def add_figures(record: Record, is_foreign: bool = False) -> Record:
    """The record of a run of ours with the figures that follow from its sizes and `step_s`, null if an input is not
    known. `is_foreign`: its steps are those of another program's log."""
    figures, flags = figures_of(record, is_foreign)
    return with_figures(record, figures, [flag for flag in flags if flag not in record.flags])


def with_figures(record: Record, figures: Figures, flags: Sequence[str]) -> Record:
    """The record with figures, their sources, and more flags."""
    sources = {**record.sources, **{name: source for name, (_, source) in figures.items()}}
    values: dict[str, Any] = {name: value for name, (value, _) in figures.items()}
    return replace(record, **values, sources=sources, flags=[*record.flags, *flags])


def figures_of(record: Record, foreign: bool = False) -> tuple[Figures, list[str]]:
    """Returns (the figures that follow from the sizes and `step_s` of a record, flags).

    If some steps are heavy, the rates of a `foreign` log follow the mean step, as the median leaves out part of the
    work.
    """
    figures, flags = _memory_by_formula(record), list[str]()
    step_s, mean = record.step_s, record.step_s_mean
    # With few steps a single slow one moves the mean, so it does not show periodic steps.
    heavy = bool(step_s and mean and mean > _HEAVY * step_s and (record.steps_used or 0) >= _FEW)
    if heavy and step_s and mean:
        message = f"some steps are heavy: the mean step takes {mean:.4g} s, {mean / step_s:.2f} x the median"
        flags.append(f"{message}; the rates follow the mean" if foreign else message)
        step_s = mean if foreign else step_s
    batch, seq, gpus, speed = record.global_batch, record.seq, record.gpus, record.tokens_per_s
    if step_s and batch and seq:
        speed = batch * seq / step_s
        figures["tokens_per_s"] = (speed, _BY_MEAN if heavy and foreign else "global_batch x seq / step_s")
    if speed and gpus and (not foreign or not record.tokens_per_s_gpu):
        figures["tokens_per_s_gpu"] = (speed / gpus, "tokens_per_s / gpus")
    flops: Figures = {}
    if step_s and batch and seq and gpus:
        flops = _flops(record, step_s, batch, seq, gpus)
    elif seq and record.tokens_per_s_gpu and not record.tokens_per_s:
        # The number of GPUs is not known, but each trains as many tokens/s as the program prints.
        flops = _flops(record, seq / record.tokens_per_s_gpu, 1, seq, 1)
    if flops:
        shares, lacking = _shares(record, flops)
        figures |= flops | shares
        flags += lacking
        flags += [f"attention over a window ({limit}): TFLOPs are left out"] if (limit := _window(record)) else []
    return figures, flags


def step_s_of_rates(record: Record) -> float | None:
    """The step time behind the record's rates: the median, or the mean if some steps are heavy."""
    return record.step_s_mean if record.sources.get("tokens_per_s") == _BY_MEAN else record.step_s


def _memory_by_formula(record: Record) -> Figures:
    """The memory by the formula of "Training Parallelism", for one GPU's share of the model."""
    sizes = (record.params, record.micro_batch, record.seq, record.layers, record.hidden, record.heads, record.vocab)
    params, batch, seq, layers, hidden, heads, vocab = sizes
    tp, pp = record.tp, record.pp
    if not (params and batch and seq and layers and hidden and heads and vocab and tp and pp):
        return {}
    bytes_each = 4 if record.dtype == "fp32" else 2
    figure = memory_seed003_gib(
        params=params / (tp * pp),
        batch=batch / (record.cp or 1),  # counted in whole samples: each rank has 1 / cp of every activation
        seq=seq,
        layers=layers / pp,
        hidden=hidden / tp,
        heads=heads / tp,
        vocab=vocab / tp,
        bytes_each=bytes_each,
    )
    where = f"(4 P + 2 B C (2 V + l (6 e + h C))) x {bytes_each} bytes, for one rank's tp and pp share"
    where += " and cp share of B" if (record.cp or 1) > 1 else ""
    return {"memory_seed003_gib": (figure, f"{where}; no sharding")}


def _flops(record: Record, step_s: float, batch: int, seq: int, gpus: int) -> Figures:
    flops: Figures = {}
    layers, hidden, vocab = record.layers, record.hidden, record.vocab
    recompute = known_recompute(record.recompute)
    sizes = {"seq": seq, "global_batch": batch, "gpus": gpus}
    params, weights, width = _active(record)
    shape = _shape(record)
    keys = shape.attention_keys if shape is not None else None
    window = f"; attention over {keys:,.6g} of {seq:,} keys, the mean over the layers" if keys else ""
    of = "" if not params or params == record.params else f"; P: the {params:,.0f} parameters that a token uses"
    if params and recompute:
        figure = tflops_seed(params=params, recompute=recompute, step_s=step_s, **sizes)
        flops["tflops_seed"] = (figure, f"{seed_factor(recompute):g} P s B / (t n 1e12){of}")
    if limit := _window(record):
        width = None
        flops |= dict.fromkeys(("tflops_hardware", "tflops_model"), (None, f"null: attention over a window ({limit})"))
    linear = recomputation(recompute).linear if recompute else frozenset()
    has_weights = shape is not None and isinstance(record.settings.get("model"), dict)
    if layers and hidden and vocab and recompute and weights and width and (has_weights or not linear):
        figure = tflops_hardware(
            layers=layers,
            hidden=hidden,
            vocab=vocab,
            recompute=recompute,
            step_s=step_s,
            layer_weights=weights,
            again_weights=shape.weights_in(linear) if shape is not None else 0,
            attention_width=width,
            attention_keys=keys,
            **sizes,
        )
        flops["tflops_hardware"] = (figure, f"Narayanan et al. 2021 eq. 3, recompute {recompute}{window}")
    if layers and width and params:
        counted = _multiplied(record, params, weights)
        figure = tflops_model(
            layers=layers, hidden=width, params=counted or params, step_s=step_s, attention_keys=keys, **sizes
        )
        flops["tflops_model"] = (figure, f"{MULTIPLIED if counted else f'{_EVERY}{of}'}{window}")
    return flops


def _multiplied(record: Record, params: float, weights: float | None) -> float | None:
    """The weights that `tflops_hardware` counts; None if unknown, or if GPT-2's weights do not fit the model."""
    if not (record.layers and record.hidden and record.vocab and weights):
        return None
    counted = record.layers * weights + record.vocab * record.hidden
    has_shape = "active" in record.settings or isinstance(record.settings.get("model"), dict)
    return counted if has_shape or abs(params / counted - 1) <= _TABLES else None


def _active(record: Record) -> tuple[float | None, float | None, float | None]:
    """Returns (parameters, weights of a layer, width of attention) that multiply a token; None for each unknown one.

    The record of another program's log has them as `active` among its settings; the record of our run has its shape in
    `settings.model`. Without either the layers are GPT-2's.
    """
    active = record.settings.get("active")
    if active is not None:
        return active.get("params"), active.get("layer_weights"), active.get("attention_width")
    if not (record.hidden and record.layers and record.heads):
        return record.params, 12 * (record.hidden or 0) ** 2, record.hidden
    if (shape := _shape(record)) is None:
        return record.params, None, None
    if not shape.special_keys:
        return record.params, shape.layer_weights, shape.query_width
    return record.params_active or record.params, *shape.work_of_layer


_KEYS_OF_SHAPE = {entry.name for entry in fields(ModelShape)}


def _shape(record: Record) -> ModelShape | None:
    """The shape in the record of a run of ours, GPT-2's without `settings.model`; None if sizes lack or are damaged."""
    model = record.settings.get("model")
    sizes = {name: getattr(record, name) for name in ("hidden", "layers", "heads", "vocab", "seq")}
    keys = {key: value for key, value in model.items() if key in _KEYS_OF_SHAPE} if isinstance(model, dict) else {}
    try:
        shape: ModelShape = from_tables(ModelShape, {**keys, **{key: size for key, size in sizes.items() if size}})
    except (KeyError, TypeError, ValueError):
        return None
    return shape


# Arguments of any program that may limit the keys that a token attends to, and words in them that do not.
_LIMITS = re.compile(
    r"(?!use_)(?:\w+_)?(?:sliding|attn|attention|local)_(?:\w+_)?window\w*|window_(?:size|pattern)|sparse_attention"
    r"|attention_(?:chunk_size|config|type)"
)
_WHOLE = frozenset(("none", "null", "false", "global", "flash", "full", "all", "l"))


def _window(record: Record) -> str:
    """The argument that limits attention to a window, by another program's log or by what our run gives to Megatron-LM;
    "" without one. The formulas count all keys, so that FLOPs are then not known."""
    engine, logged = (record.settings.get(name) for name in ("engine", "arguments"))
    options = engine.get("megatron_args") if isinstance(engine, dict) else None
    if isinstance(options, list) and any(str(word).startswith("--window-size") for word in options):
        return "--window-size"
    texts = {name.strip("\"=:' "): str(text).lower() for name, text in (logged or {}).items()}
    if "false" in texts.get("use_sliding_window", ""):
        texts.pop("sliding_window", None)
    for name, text in texts.items():
        keys = int(number[0]) if (number := re.search(r"-?\d{1,15}", text)) and "_config" not in name else 0
        if _LIMITS.fullmatch(name) and (
            set(re.findall("[a-z_]+", text)) - _WHOLE or 0 < keys < (record.seq or math.inf)
        ):
            return f"{name} is {text[:40]}"
    return ""


def _shares(record: Record, flops: Figures) -> tuple[Figures, list[str]]:
    """Returns (mfu and hfu by the peak of the device, flags if they are null)."""
    names = {"mfu": ("tflops_model", mfu), "hfu": ("tflops_hardware", hfu)}
    if record.device is None:
        return {name: (getattr(record, name), "null: no device is named") for name in names}, []
    units = record.units
    peak = peak_tflops(record.device, units or "")
    if peak is None:
        if record.device not in DEVICES:
            lack = "no peaks known"
        else:
            lack = f"no dense {units} peak known" if units else "no dtype is named"
        lack = f"{lack} for device {record.device}"
        null = {name: (getattr(record, name), f"null: {lack}") for name in names}
        return null, [Flag(f"{lack}: mfu and hfu are null", "no_peak")]
    figures: Figures = {}
    for name, (of, formula) in names.items():
        rate, source = flops.get(of, (getattr(record, of), f"null: {of} is not known"))
        figures[name] = (None, source)
        if rate is not None:
            figures[name] = (formula(rate, peak), f"{of} / {peak} dense {units} TFLOP/s of {record.device}")
    return figures, []
