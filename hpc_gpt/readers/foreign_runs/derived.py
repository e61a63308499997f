"""What follows from the stated fields: layout, batch, vocabulary, dtype, engine. Each says how it was inferred."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from hpc_gpt.readers.foreign_runs.draft import Draft
from hpc_gpt.settings.devices import device_named
from hpc_gpt.settings.layout import Layout

_DTYPES = {
    "float16": "fp16",
    "half": "fp16",
    "16-mixed": "fp16",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "32": "fp32",
    "16": "fp16",
}
# Engines that split nothing but the batch.
DATA_PARALLEL = frozenset(("hf", "hf-deepspeed", "ddp", "nanogpt", "modded-nanogpt", "llm.c"))


def derive(draft: Draft, dialects: Sequence[str], arguments: Mapping[str, str]) -> None:
    """Settles what follows from what is stated."""
    _words(draft)
    _engine(draft, dialects)
    _layout(draft, arguments)
    _batch(draft)
    _vocab(draft, arguments)


def _words(draft: Draft) -> None:
    """Names as the record has them."""
    if (dtype := draft.get("dtype")) is not None:
        plain = str(dtype).lower().replace("torch.", "").strip()
        draft.values["dtype"] = _DTYPES.get(plain, plain)
    if (device := draft.get("device")) is not None:
        draft.values["device"] = device_named(str(device)) or str(device)


def _engine(draft: Draft, dialects: Sequence[str]) -> None:
    deepspeed = [name for name in dialects if name.startswith("deepspeed")]
    stage, said = draft.get("zero_stage"), draft.get("engine")
    if said in (None, "megatron-lm", "hf") and (deepspeed or (stage or 0) >= 1):
        why = f"{deepspeed[0]}'s lines" if deepspeed else f"ZeRO stage {stage}"
        if said == "hf":
            draft.set("engine", "hf-deepspeed", f"inferred: a Trainer's log with {why}")
        elif said == "megatron-lm" and deepspeed:
            pipes = ((draft.whole("pp") or 1) > 1 or "deepspeed_pipe" in deepspeed) and (stage or 0) < 2
            which = "deepspeed-3d" if pipes else "deepspeed-zero"
            draft.set(
                "engine", which, f"inferred: Megatron's log with {why}, {'a pipeline' if pipes else 'no pipeline'}"
            )


def _layout(draft: Draft, arguments: Mapping[str, str]) -> None:
    if (nodes := draft.whole("nodes")) and (each := draft.whole("gpus_per_node")):
        draft.infer("gpus", nodes * each, f"nodes {nodes} x gpus_per_node {each}")
    gpus = draft.whole("gpus")
    splits = [name for name in ("tp", "pp") if name not in draft]
    if gpus == 1:
        for name in ("tp", "pp", "dp"):
            draft.infer(name, 1, "one GPU")
    elif draft.get("engine") in DATA_PARALLEL:
        for name in splits:
            draft.infer(name, 1, f"{draft.get('engine')} splits the batch alone")
        _ranks_of_batch(draft)
    elif arguments and len(splits) == 1:
        draft.infer(splits[0], 1, "the dump of arguments names none")
    tp, pp, dp = (draft.whole(name) for name in ("tp", "pp", "dp"))
    cp = draft.whole("cp") or 1
    ways = "tp x pp" + (" x cp" if cp > 1 else "")
    if gpus and tp and pp and not dp and gpus % (tp * pp * cp) == 0:
        draft.infer("dp", gpus // (tp * pp * cp), f"gpus {gpus} / ({ways})")
    elif gpus and tp and dp and not pp and gpus % (tp * dp * cp) == 0:
        draft.infer("pp", gpus // (tp * dp * cp), f"gpus {gpus} / (tp x dp{' x cp' if cp > 1 else ''})")
    elif tp and pp and dp and not gpus:
        draft.infer("gpus", tp * pp * dp * cp, f"{ways} x dp")
    gpus, dp = draft.whole("gpus"), draft.whole("dp")
    if gpus and tp and pp and not dp:
        draft.flag(f"{gpus} GPUs are no multiple of {ways} = {tp * pp * cp}: the layout cannot be")
    elif gpus and tp and pp and dp and tp * pp * dp * cp != gpus:
        layout = Layout(tp, pp, dp)
        draft.flag(f"layout {layout} needs {tp * pp * dp * cp} GPUs, but {gpus} are stated ({draft.sources['gpus']})")
    if gpus and (each := draft.whole("gpus_per_node")):
        draft.infer("nodes", math.ceil(gpus / each), f"gpus {gpus} / gpus_per_node {each}")


def _ranks_of_batch(draft: Draft) -> None:
    """How many ranks share the batch, where nothing says so but the batch itself."""
    micro, chunks, whole = (draft.whole(name) for name in ("micro_batch", "micro_batches", "global_batch"))
    if not draft.whole("gpus") and micro and chunks and whole and whole % (micro * chunks) == 0:
        how = f"global_batch {whole} / (micro_batch {micro} x micro_batches {chunks})"
        draft.infer("dp", whole // (micro * chunks), how)


def _batch(draft: Draft) -> None:
    tokens, seq = draft.whole("global_batch_tokens"), draft.whole("seq")
    if tokens and seq and tokens % seq == 0:
        draft.infer("global_batch", tokens // seq, f"{tokens} tokens a batch / seq {seq}")
    dp, tokens, seq = draft.whole("dp"), draft.whole("global_batch_tokens"), draft.whole("seq")
    if tokens and seq and tokens % seq == 0:
        draft.infer(
            "global_batch", tokens // seq, f"{tokens} tokens a step ({draft.sources['global_batch_tokens']}) / seq"
        )
    names = ("micro_batch", "micro_batches", "global_batch")
    micro, chunks, whole = (draft.whole(name) for name in names)
    if not dp:
        return
    if micro and chunks and not whole:
        draft.infer("global_batch", micro * chunks * dp, f"micro_batch {micro} x micro_batches {chunks} x dp {dp}")
    elif micro and whole and not chunks and whole % (micro * dp) == 0:
        draft.infer("micro_batches", whole // (micro * dp), f"global_batch {whole} / (micro_batch {micro} x dp {dp})")
    elif chunks and whole and not micro and whole % (chunks * dp) == 0:
        draft.infer("micro_batch", whole // (chunks * dp), f"global_batch {whole} / (micro_batches {chunks} x dp {dp})")
    micro, chunks, whole = (draft.whole(name) for name in names)
    if micro and whole and not chunks:
        draft.flag(f"global_batch {whole} is no multiple of micro_batch {micro} x dp {dp} = {micro * dp}")
    elif micro and chunks and whole and micro * chunks * dp != whole:
        product = f"micro_batch {micro} x micro_batches {chunks} x dp {dp} = {micro * chunks * dp}"
        draft.flag(f"{product}, but the global batch is {whole} ({draft.sources['global_batch']})")


def _vocab(draft: Draft, arguments: Mapping[str, str]) -> None:
    plain, multiple = draft.whole("vocab_unpadded"), number(arguments, "make_vocab_size_divisible_by")
    if "vocab" in draft or not plain:
        return
    if multiple and (tp := draft.whole("tp")):
        rows = multiple * tp
        how = f"vocabulary {plain} padded to a multiple of {multiple} x tp {tp}"
        draft.infer("vocab", math.ceil(plain / rows) * rows, how)
    else:
        draft.set("vocab", plain, f"{draft.sources['vocab_unpadded']}, not padded")


def step_tokens(draft: Draft) -> int | None:
    """Tokens of one step, None where the batch is not known."""
    batch, seq = draft.whole("global_batch"), draft.whole("seq")
    return batch * seq if batch and seq else draft.whole("global_batch_tokens")


def is_on(arguments: Mapping[str, str], *names: str) -> bool:
    """Whether one of the arguments is given and true."""
    return any(arguments.get(name, "").strip().lower() in ("true", "1", "yes") for name in names)


def number(arguments: Mapping[str, str], *names: str) -> int | None:
    """The first of the arguments that is a whole number."""
    for name in names:
        if re.fullmatch(r"\d{1,15}", arguments.get(name, "").strip()):
            return int(arguments[name])
    return None
