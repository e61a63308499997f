"""Infers fields from the stated ones: layout, batch, vocabulary, dtype and engine.

A program's own counts also show settings that it does not print. Each source says how a value was inferred.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hpc_gpt.core.engines import engines
from hpc_gpt.core.format import counted
from hpc_gpt.core.settings.devices import device_named
from hpc_gpt.core.settings.layout import AXES, Layout
from hpc_gpt.reader.dialects.generic import DIFFUSION
from hpc_gpt.reader.logs import Part
from hpc_gpt.reader.pattern import dtype_named
from hpc_gpt.reader.records.draft import LIBRARY, Draft
from hpc_gpt.reader.records.log_steps import LogSteps
from hpc_gpt.reader.steps import StepColumn

_MOST_GPUS = 64  # a larger world size may count something else
_LEAST_ALIKE = 3  # lines that are needed to show a batch that nothing states
# Programs that split only the batch, as our engines without another axis do.
_ONLY_BATCH = frozenset(("hf", "nanogpt", "build-nanogpt", "nanochat", "modded-nanogpt", "llm.c", "deepspeed-chat"))


def infer_fields(draft: Draft, dialects: Sequence[str], arguments: Mapping[str, str]) -> None:
    """Adds the fields that follow from the stated ones."""
    _normalise_names(draft)
    _engine(draft, dialects)
    _layout_and_batch(draft, arguments)
    _vocab(draft, arguments)


def _normalise_names(draft: Draft) -> None:
    """Rewrites dtype and device with the record's names."""
    if (dtype := draft.get("dtype")) is not None:
        draft.values["dtype"] = dtype_named(str(dtype)) or str(dtype).lower().replace("torch.", "").strip()
    if "fp8_products" in draft:
        draft.set("dtype", "fp8", draft.sources["fp8_products"])
    if (device := draft.get("device")) is not None:
        draft.values["device"] = device_named(str(device)) or str(device)


def _engine(draft: Draft, dialects: Sequence[str]) -> None:
    deepspeed = [dialect for dialect in dialects if dialect.startswith("deepspeed")]
    stage, engine = draft.get("zero_stage"), draft.get("engine")
    why = f"{deepspeed[0]}'s lines" if deepspeed else f"ZeRO stage {stage}"
    if engine == "hf" and (deepspeed or (stage or 0) >= 1):
        draft.set("engine", "hf-deepspeed", f"inferred: a Trainer's log with {why}")
    elif engine in engines() and deepspeed:
        pipes = ((draft.whole("pp") or 1) > 1 or "deepspeed_pipe" in deepspeed) and (stage or 0) < 2
        if with_deepspeed := engines()[engine].engine_with_deepspeed(pipes):
            pipeline = "a pipeline" if pipes else "no pipeline"
            draft.set("engine", with_deepspeed, f"inferred: Megatron's log with {why}, {pipeline}")


def splits_only_the_batch(engine: object) -> bool:
    """Whether an engine, ours or another program's, has no axis but dp."""
    return engine in _ONLY_BATCH or (engine in engines() and not engines()[str(engine)].axes)


class Inference(NamedTuple):
    """A rule for a field: the product of the fields `of` divided by the product of `over`, if all are known and the
    result is whole, or rounded `up`. Without fields it is 1, for the reason `says`. `when`: whether the rule applies,
    by the draft and the dump of arguments.
    """

    field: str
    of: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    says: str = ""
    when: Callable[[Draft, Mapping[str, str]], bool] = lambda *_: True
    up: bool = False


def _one_gpu(draft: Draft, _: Mapping[str, str]) -> bool:
    return draft.whole("gpus") == 1


def _batch_alone(draft: Draft, _: Mapping[str, str]) -> bool:
    return splits_only_the_batch(draft.get("engine"))


def _names_the_other(draft: Draft, arguments: Mapping[str, str]) -> bool:
    return bool(arguments) and ("tp" in draft) != ("pp" in draft) and not _batch_alone(draft, arguments)


def _gpus_are_sure(draft: Draft, _: Mapping[str, str]) -> bool:
    """Whether the number of GPUs is stated: one that is itself inferred is too weak for a batch."""
    return "inferred" not in draft.sources.get("gpus", "")


# The first rule for a field that applies is used.
INFERENCES = (
    Inference("gpus", ("nodes", "gpus_per_node")),
    *(Inference(axis, says="one GPU", when=_one_gpu) for axis in AXES),
    *(Inference(axis, says="{engine} splits only the batch", when=_batch_alone) for axis in ("tp", "pp")),
    *(Inference(axis, says="the dump of arguments names none", when=_names_the_other) for axis in ("tp", "pp")),
    Inference("global_batch", ("global_batch_tokens",), ("seq",)),
    Inference("dp", ("gpus",), ("tp", "pp", "cp")),
    Inference("pp", ("gpus",), ("tp", "dp", "cp")),
    Inference("dp", ("global_batch",), ("micro_batch", "micro_batches")),
    Inference("gpus", ("tp", "pp", "cp", "dp")),
    Inference("global_batch", ("micro_batch", "micro_batches", "dp")),
    Inference("micro_batches", ("global_batch",), ("micro_batch", "dp")),
    Inference("micro_batch", ("global_batch",), ("micro_batches", "dp"), when=_gpus_are_sure),
    Inference("nodes", ("gpus",), ("gpus_per_node",), up=True),
)


def _apply(draft: Draft, way: Inference, arguments: Mapping[str, str]) -> bool:
    """Adds the field of a rule if it is unknown and the rule applies; a program that does not name cp has none."""
    if way.field in draft or not way.when(draft, arguments):
        return False
    sizes = {name: draft.whole(name) or (1 if name == "cp" else 0) for name in (*way.of, *way.over)}
    above, below = (math.prod(sizes[name] for name in names) for names in (way.of, way.over))
    if not above or not below or (above % below and not way.up):
        return False
    # The record has the sizes of a layout; the source of a batch names the sizes.
    bare = AXES if "gpus" in (way.field, *way.of) else ()
    shown = {name: name if name in bare else f"{name} {size}" for name, size in sizes.items()}
    of, over = (
        " x ".join(shown[name] for name in names if name != "cp" or sizes[name] > 1) for names in (way.of, way.over)
    )
    divisor = f" / ({over})" if " x " in over else f" / {over}" if over else ""
    draft.infer(way.field, -(-above // below), way.says.format(engine=draft.get("engine")) or of + divisor)
    return True


def _layout_and_batch(draft: Draft, arguments: Mapping[str, str]) -> None:
    """Applies the rules until none adds a field; flags sizes that contradict each other."""
    _drop_library(draft)
    while any(_apply(draft, way, arguments) for way in INFERENCES):
        pass
    gpus, tp, pp, dp = (draft.whole(name) for name in ("gpus", "tp", "pp", "dp"))
    cp = draft.whole("cp") or 1
    if gpus and tp and pp and not dp:
        ways = "tp x pp" + (" x cp" if cp > 1 else "")
        draft.flag(f"{gpus} GPUs are not a multiple of {ways} = {tp * pp * cp}: the layout is impossible", "layout")
    elif gpus and tp and pp and dp and tp * pp * dp * cp != gpus:
        needed = counted(tp * pp * dp * cp, "GPU")
        draft.flag(
            f"layout {Layout(tp, pp, dp, cp)} needs {needed}, but {gpus} are stated ({draft.sources['gpus']})", "layout"
        )
    micro, chunks, whole = (draft.whole(name) for name in ("micro_batch", "micro_batches", "global_batch"))
    if dp and micro and whole and not chunks:
        draft.flag(f"global_batch {whole} is not a multiple of micro_batch {micro} x dp {dp} = {micro * dp}", "batch")
    elif dp and micro and chunks and whole and micro * chunks * dp != whole:
        product = f"micro_batch {micro} x micro_batches {chunks} x dp {dp} = {micro * chunks * dp}"
        draft.flag(f"{product}, but the global batch is {whole} ({draft.sources['global_batch']})", "batch")


def drop_tokens(draft: Draft, *rates: str) -> None:
    """Drops the sequence and the shape of a log that trains a diffusion model, because they belong to its text encoder,
    and `rates`."""
    if DIFFUSION not in draft:
        return
    for name in ("seq", "hidden", "layers", "heads", "vocab", "global_batch_tokens", *rates):
        draft.values.pop(name, None)
        draft.sources.pop(name, None)
    draft.flag("the log trains a diffusion model: its steps have no text tokens")


def _drop_library(draft: Draft) -> None:
    """Drops a library's size of the batch if the program's sizes contradict it: the batch grew after the dump."""
    sizes = [draft.whole(name) for name in ("micro_batch", "micro_batches", "dp", "global_batch")]
    micro, chunks, dp, whole = sizes
    if not (micro and chunks and dp and whole) or micro * chunks * dp == whole:
        return
    for name in ("micro_batches", "global_batch", "micro_batch"):
        if draft.by.get(name) == LIBRARY:
            del draft.values[name], draft.sources[name]
            return


def _vocab(draft: Draft, arguments: Mapping[str, str]) -> None:
    plain, multiple = draft.whole("vocab_unpadded"), number_of(arguments, "make_vocab_size_divisible_by")
    if "vocab" in draft or not plain:
        return
    if multiple and (tp := draft.whole("tp")):
        rows = multiple * tp
        how = f"vocabulary {plain} padded to a multiple of {multiple} x tp {tp}"
        draft.infer("vocab", math.ceil(plain / rows) * rows, how)
    else:
        draft.set("vocab", plain, f"{draft.sources['vocab_unpadded']}, not padded")


def step_tokens(draft: Draft) -> int | None:
    """The tokens of one step, None if the batch is not known."""
    batch, seq = draft.whole("global_batch"), draft.whole("seq")
    return batch * seq if batch and seq else draft.whole("global_batch_tokens")


def is_on(arguments: Mapping[str, str], *names: str) -> bool:
    """Whether one of the arguments is given and true."""
    return any(arguments.get(name, "").strip().lower() in ("true", "1", "yes") for name in names)


def number_of(arguments: Mapping[str, str], *names: str) -> int | None:
    """The first of the arguments that is a whole number."""
    for name in names:
        if re.fullmatch(r"\d{1,15}", arguments.get(name, "").strip()):
            return int(arguments[name])
    return None


def add_seq(draft: Draft, steps: LogSteps) -> None:
    """Adds the tokens per sample: tokens over samples consumed between two lines, if all lines agree."""
    ratio = _consumed(steps, "consumed_tokens", "consumed_samples")
    if "seq" not in draft and _is_one_size(ratio):
        draft.infer("seq", int(ratio[0]), f"consumed_tokens / consumed_samples, the same over {len(ratio)} lines")


def add_batch(draft: Draft, steps: LogSteps) -> None:
    """Adds the samples and tokens per step: those consumed between two lines over the steps, if all lines agree.

    They also replace a smaller stated batch, such as the first one of a ramp, if the last lines are past the ramp.
    """
    if not steps.numbered:
        return
    tokens, samples = (_consumed(steps, name, "step") for name in ("consumed_tokens", "consumed_samples"))
    if len(tokens) >= _LEAST_ALIKE and _is_one_size(tokens):
        source = f"consumed_tokens / steps, the same over {len(tokens)} lines"
        draft.infer("global_batch_tokens", int(tokens[0]), source)
    if stated := draft.whole("global_batch"):
        last = samples[-max(_LEAST_ALIKE, len(samples) // 3) :]
        if len(last) >= _LEAST_ALIKE and last[0] > stated and _is_one_size(last):
            where = draft.sources["global_batch"]
            draft.flag(f"the batch was {stated} ({where}), but the last steps consume {last[0]:.0f}")
            source = f"inferred: consumed_samples / steps, over the last {len(last)} lines"
            draft.set("global_batch", int(last[0]), source)
    elif _is_one_size(samples):
        draft.infer("global_batch", int(samples[0]), f"consumed_samples / steps, the same over {len(samples)} lines")


def _consumed(steps: LogSteps, name: str, over: str) -> StepColumn:
    """What is consumed between two lines over the difference in `over`; empty if a line does not say it."""
    consumed, apart = np.diff(steps[name]), np.diff(steps[over])
    with np.errstate(all="ignore"):
        ratio = (consumed / apart)[apart > 0]
    return ratio if np.isfinite(ratio).all() else ratio[:0]


def _is_one_size(sizes: StepColumn) -> bool:
    return bool(len(sizes) and sizes[0] >= 1 and sizes[0] % 1 == 0 and (sizes == sizes[0]).all())


def _counts_of_gpus(draft: Draft, parts: Sequence[Part]) -> list[tuple[int, str]]:
    """(GPUs, source) by printed world sizes, labels of ranks, nodes, and the table of a single node's GPUs."""
    on_cpus = any(part.facts.get("gpus_unused") for part in parts)
    world_sizes = [fact for part in parts for fact in part.facts.get("gpus_said", ()) if not on_cpus]
    counts = [
        (int(fact.value), f"{fact.place}, the world size") for fact in world_sizes if 0 < fact.value <= _MOST_GPUS
    ]
    ranks: dict[int, bool] = {}
    for part in parts:
        ranks |= part.other_ranks
        if part.other_ranks and part.step_rank is not None:
            ranks.setdefault(part.step_rank, True)
    if len(ranks) > 1 and len(ranks) == max(ranks) + 1 and all(ranks.values()):
        counts.append((len(ranks), f"ranks 0 to {max(ranks)} print lines of steps"))
    nodes, per_node = draft.whole("nodes"), draft.whole("gpus_per_node")
    if nodes and per_node:
        return [(nodes * per_node, f"nodes {nodes} x gpus_per_node {per_node}")]
    listed = {fact.value for part in parts for fact in part.facts.get("gpu_index", ())}
    has_more = any(part.facts.get("gpu_index_above_7") for part in parts)
    if nodes == 1 and listed and not has_more and listed == set(range(len(listed))):
        counts.append((len(listed), "the only node's table of GPUs"))
    return counts


def add_gpus(draft: Draft, parts: Sequence[Part]) -> None:
    """Adds the number of GPUs: the ranks that print their start, or what world sizes, labels and nodes agree on."""
    # The ranks say more than a node's platform: a GB200 node has 4 or 8 GPUs.
    ranks = {part.starts.get("mlperf", 0) for part in parts} - {0}
    if len(ranks) == 1 and (count := ranks.pop()) > 1 and "gpus" not in draft:
        draft.infer("gpus", count, f"{count} ranks print init_start")
    counts = _counts_of_gpus(draft, parts)
    # Only if all counts agree.
    if counts and len({count for count, _ in counts}) == 1 and "gpus" not in draft:
        draft.infer("gpus", counts[0][0], counts[0][1])
