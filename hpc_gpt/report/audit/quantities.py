"""Quantities in a published table: their names in headings and formulas, their units, and the numbers in cells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

# Names as `plain_name` writes them. A name has only one quantity.
_NAMES: dict[str, str] = {
    "gpus": "gpus|n gpus|n gpu|ngpus|ngpu|num gpus|num gpu|number of gpus|gpu num|total gpus|total number of gpus|"
    "gpu count|world size|worldsize|devices|num devices|number of devices|accelerators",
    "nodes": "nodes|num nodes|n nodes|nnodes|number of nodes|node count",
    "gpus_per_node": "gpus per node|gpus node|n gpus per node|num gpus per node|devices per node",
    "size": "size|model size|params|param|parameters|n params|num params|num parameters|number of parameters|"
    "model params|model parameters|total params|total parameters|parameter count|param count",
    "tp": "tp|tp size|tp degree|tensor parallel|tensor parallelism|tensor parallel size|tensor model parallel size|"
    "tensor parallel degree|tensor mp size|mp|model parallel size",
    "pp": "pp|pp size|pp degree|pipeline parallel|pipeline parallelism|pipeline parallel size|pipeline stages|"
    "pipeline model parallel size|number of pp stages|pp stages|pipeline parallel degree",
    "dp": "dp|dp size|dp degree|data parallel|data parallelism|data parallel size|data parallel degree",
    "cp": "cp|cp size|context parallel|context parallelism|context parallel size",
    "sp": "sp size|ulysses|ulysses degree|sequence parallel degree|sequence parallel size",
    "micro_batch": "mic bs|micro bs|mbs|micro batch|micro batch size|microbatch size|microbatch|micro batchsize|"
    "batch size per gpu|per gpu batch size|per device batch size|per device train batch size|"
    "train micro batch size per gpu|device batch size|bs per gpu|local batch size",
    "micro_batches": "pp chunks|chunks|gas|ga steps|gradient accumulation|gradient accumulation steps|"
    "gradient accumulation size|grad accum|grad acc|grad acc steps|grad accum steps|acc steps|accumulation steps|"
    "micro batches|microbatches|num micro batches|num microbatches|number of micro batches|number of microbatches",
    "global_batch": "glob bs|gbs|global bs|global batch|global batch size|global batchsize|global train batch size|"
    "total batch size|train batch size",
    "batch_tokens": "batch tokens|tokens per batch|tokens batch|tokens per step|tokens step|tokens per iteration|"
    "tokens iteration|tokens iter|tokens per global batch|batch size tokens|global batch tokens|"
    "global batch size tokens|total batch size tokens",
    "seq": "context|context window|seq|seq len|seqlen|seq length|sequence length|sequence len|seq size|"
    "context length|context size|ctx len|block size|n ctx|max seq len|max sequence length",
    "hidden": "hidden|hidden size|hidden dim|d model|n embd|embed dim|embedding dim|embedding size",
    "layers": "layers|n layers|n layer|num layers|number of layers|nlayers",
    "heads": "heads|n heads|n head|num heads|number of heads|attention heads|num attention heads",
    "vocab": "vocab|vocab size|vocabulary size|vocabulary|padded vocab size|n vocab",
    "throughput": "throughput|speed|performance",
    "step_s": "step time|time per step|step duration|iteration time|iter time|time per iteration|time per iter|"
    "time iteration|time iter|time step|elapsed time per iteration|s it|sec it|sec step|s step|s iter|sec iter|"
    "seconds per step|seconds per iteration|time in sec per iteration|time in sec per interation|ms per step|step s|"
    "train step timing|train step time",
    "tokens_per_s": "tokens s|tok s|toks s|tokens sec|tok sec|tokens per second|tokens per sec|token s|tps|"
    "total tokens s",
    "tokens_per_s_per_gpu": "tokens s gpu|tok s gpu|tokens sec gpu|tokens per second per gpu|tps gpu|"
    "tokens s device|tokens gpu s|tokens per sec per gpu",
    "samples_per_s": "samples s|samples sec|samples per second|samples per sec|sequences s|seq s|sequences per second|"
    "sequences sec|train samples per second",
    "tflops": "tflops|tflop s|tflop|tflops s|teraflops|tflops gpu|tflop s gpu|tflops per gpu|tflops device|"
    "achieved tflops|achieved tflop s|tflop s device|tflops s gpu|effective tflops|approx tflops|"
    "achieved tflops gpu",
    "tflops_seed": "tflops seed|seed tflops|tflops seed formula|tflops p s b|tflops 8 or 6 p s b",
    "tflops_hardware": "tflops hardware|hardware tflops|hardware tflops gpu|hardware tflop s",
    "tflops_model": "tflops model|model tflops|model tflops gpu|model tflop s",
    "mfu": "mfu|model flops utilization|model flops utilisation",
    "hfu": "hfu|hardware flops utilization|hardware flops utilisation",
    "memory": "memory|mem|gpu memory|peak memory|max memory|gpu memory peak|memory usage|max mem",
    "layout": "layout|parallelism|parallel layout|parallel strategy|parallelization",
    "notes": "notes|note|comment|comments|date|remarks|remark|log|status",
}
# The units of a batch in samples; one in tokens is another quantity.
_COUNTED_IN = ("samples", "sequences", "seqs", "seq")
# Names in formulas only, as they may be the heading of something else.
_IN_FORMULAS = {"ng": "gpus", "ms": "size", "sp": "step_s"}

# The factor of each unit. Sizes in 1, times in s, rates per second, TFLOPs in 1e12, memory in bytes, shares in 1.
Units = dict[str, int | Fraction]


def _worth(worth: int | Fraction, units: str) -> Units:
    return dict.fromkeys(units.split("|"), worth)


_TIMES: Units = _worth(1, "s|sec|secs|second|seconds|s/it|sec/it|s/step|sec/step|s/iter|sec/iter")
_TIMES |= _worth(Fraction(1, 1000), "ms|msec|milliseconds|ms/step|ms/it|ms/iter") | _worth(60, "min|mins|minutes")
_TIMES |= {"us": Fraction(1, 10**6)}
_SIZES: Units = _worth(10**9, "b|g|bn|billion") | _worth(10**6, "m|mn|million") | {"k": 10**3}
_SIZES |= _worth(10**12, "t|trillion")
_TFLOPS: Units = _worth(1, "tflops|tflop/s|tflop|tf|t|tflops/s|tflop/s/gpu|tflops/gpu")
_TOKENS: Units = _worth(1, "tokens/s|tok/s|toks/s|t/s|tokens/sec|tok/sec|tps|token/s")
_PER_GPU: Units = _worth(1, "tokens/s/gpu|tok/s/gpu|toks/s/gpu|t/s/gpu|tokens/sec/gpu|tps/gpu|tokens/gpu/s")
_SAMPLES: Units = _worth(1, "samples/s|samples/sec|seq/s|seqs/s|s/s|sequences/s|samples/second")
_RATES: Units = {"k": 10**3, "m": 10**6}
_BYTES: Units = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SHARES: Units = {"%": Fraction(1, 100)}
UNITS: dict[str, Units] = {
    "step_s": _TIMES,
    "size": _SIZES | {f"{unit} {word}": size for unit, size in _SIZES.items() for word in ("params", "parameters")},
    **dict.fromkeys(("tflops", "tflops_seed", "tflops_hardware", "tflops_model"), _TFLOPS),
    "tokens_per_s": _TOKENS | _RATES | {f"k {unit}": 1000 for unit in _TOKENS},
    "tokens_per_s_per_gpu": _PER_GPU | _RATES | {f"k {unit}": 1000 for unit in _PER_GPU},
    "samples_per_s": _SAMPLES,
    "batch_tokens": {"tokens": 1, **_RATES, **{f"{unit} tokens": size for unit, size in _RATES.items()}},
    "mfu": _SHARES,
    "hfu": _SHARES,
    "memory": _BYTES,
    "gpus": {"gpus": 1, "gpu": 1},
    "nodes": {"nodes": 1, "node": 1},
    "seq": {"tokens": 1},
    "layers": {"layers": 1},
    "heads": {"heads": 1},
}
# The quantity of a column Throughput, by its unit.
THROUGHPUT = dict.fromkeys(_TIMES, "step_s") | dict.fromkeys(_SAMPLES, "samples_per_s")
THROUGHPUT |= dict.fromkeys(_TOKENS, "tokens_per_s") | dict.fromkeys(_PER_GPU, "tokens_per_s_per_gpu")
THROUGHPUT |= {f"k {unit}": quantity for unit, quantity in THROUGHPUT.items() if quantity.startswith("tokens")}
THROUGHPUT |= {unit: "tflops" for unit in _TFLOPS if unit != "t"}
AXES = ("tp", "pp", "dp", "cp", "sp")
# Whole numbers from 1.
WHOLE: tuple[str, ...] = ("gpus", "gpus_per_node", "nodes", *AXES, "micro_batch", "micro_batches", "global_batch")
WHOLE += ("seq", "hidden", "layers", "heads", "vocab")
# The names that messages use, if they are not the quantity's own.
SAID = {axis: axis.upper() for axis in AXES} | {"gpus": "GPUs", "gpus_per_node": "GPUs of a node", "size": "parameters"}
SAID |= {"micro_batch": "micro-batch", "micro_batches": "micro-batches", "global_batch": "global batch"}
SAID |= {
    "batch_tokens": "tokens of a batch",
    "seq": "sequence length",
    "step_s": "step time",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
}
SAID |= {"tokens_per_s_per_gpu": "tokens/s per GPU", "tflops": "TFLOPs"}


@dataclass(frozen=True)
class Named:
    """The quantity of a name, and its unit, a key of UNITS[quantity], if the name has one."""

    quantity: str
    unit: str | None = None


def spelled(quantities: Sequence[str]) -> str:
    """A pattern of all names of the quantities, longest first, with blank, hyphen or underscore between words."""
    names = sorted((name for quantity in quantities for name in _NAMES[quantity].split("|")), key=len, reverse=True)
    return "|".join(re.escape(name).replace(r"\ ", "[ _-]") for name in names)


def quantity_of(name: str) -> str | None:
    """The quantity of a name, without its unit.

    >>> quantity_of("Tokens per second per GPU")
    'tokens_per_s_per_gpu'
    """
    return _QUANTITY.get(_short(plain_name(name)))


def _short(name: str) -> str:
    words = (_SHORT.get(word, word) for word in name.split())
    return " ".join(word for word in words if word)


_SHORT = {"per": "", "second": "s", "seconds": "s", "sec": "s", "secs": "s", "iterations": "iteration"}
_QUANTITY = {_short(name): quantity for quantity, names in _NAMES.items() for name in names.split("|")}


def axes_of(heading: str) -> tuple[str, ...]:
    """The axes of a heading such as "TP/PP/DP", in its order; empty for fewer than two.

    >>> axes_of("TP x PP")
    ('tp', 'pp')
    """
    axes = tuple(quantity_of(word) or "" for word in plain_name(heading).split() if word != "x")
    return axes if len(axes) > 1 and set(axes) <= set(AXES) and len(set(axes)) == len(axes) else ()


def plain_name(text: str) -> str:
    """A name in lower case, one blank between words.

    >>> plain_name(" Micro-batch_size ")
    'micro batch size'
    """
    return " ".join(re.findall(r"[a-z0-9]+", text[:200].lower().replace("µ", "u")))


def named(text: str, in_formula: bool = False) -> Named | None:
    """The quantity of a heading, or of a name `in_formula`; None if it is not known.

    >>> named("Iteration Time (ms)")
    Named(quantity='step_s', unit='ms')
    >>> named("model_size_in_B")
    Named(quantity='size', unit='b')
    """
    text = text.strip().strip("$#*`").strip()[:200]
    beside = re.fullmatch(r"(?P<name>[^()\[\]]{1,80}?)[,\s]*[(\[](?P<unit>[^()\[\]]{1,30})[)\]]", text)
    name, unit = (beside["name"], plain_unit(beside["unit"])) if beside else (text, None)
    if plain_name(name) in ("batch", "batch size", "bs") and unit in UNITS["batch_tokens"]:
        return Named("batch_tokens", unit)
    found = quantity_of(name) or quantity_of(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))
    if found is None and in_formula:
        found = _IN_FORMULAS.get(plain_name(name))
    if found is None and plain_name(name) in ("step", "iteration", "iter") and unit in _TIMES:
        found = "step_s"
    if found is None:
        worded = re.fullmatch(r"(?P<name>.{1,80}?)[ _-](?:in[ _-])?(?P<unit>[A-Za-z]{1,12})", name)
        found = quantity_of(worded["name"]) if worded else None
        units = THROUGHPUT if found == "throughput" else UNITS.get(found or "", {})
        if worded is None or found is None or plain_unit(worded["unit"]) not in units:
            return None
        unit = plain_unit(worded["unit"])
    if found == "throughput" and unit in THROUGHPUT:
        found = THROUGHPUT[unit]
    if unit is None and "%" in text and found in ("mfu", "hfu"):
        unit = "%"
    if unit is None and found == "step_s":
        words = plain_name(name).split()
        unit = "ms" if words[0] == "ms" else "s" if {"s", "sec", "seconds"} & set(words) else None
    if unit is not None and unit not in UNITS.get(found, {}):
        # In a heading such as "TP (tensor)" the word in brackets is not a unit.
        if found == "global_batch" and unit in UNITS["batch_tokens"]:
            return Named("batch_tokens", unit)
        in_tokens = found in ("global_batch", "micro_batch") and unit not in _COUNTED_IN
        return Named(found) if (found in WHOLE and not in_tokens) or found == "notes" else None
    return Named(found, unit)


def plain_unit(text: str) -> str:
    """A unit as in UNITS.

    >>> plain_unit(" Tokens / sec / GPU ")
    'tokens/sec/gpu'
    """
    text = re.sub(r"\s+", " ", text[:40].strip().lower().replace("µ", "u").replace("μ", "u"))
    text = re.sub(r" ?/ ?", "/", text)
    return re.sub(r"^in ", "", text)


# No figure of a training run exceeds these, and arithmetic on one that does would take too long.
_LONGEST = 40
_LARGEST_EXPONENT = 30
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<digits>\d{1,3}(?:,\d{3}){1,8}(?:\.\d{1,30})?|\d{1,40}(?:\.\d{0,30})?|\.\d{1,30})"
    r"(?:[eE](?P<exponent>[+-]?\d{1,4}))?(?P<rest>.{0,60})",
    re.DOTALL,
)
_UNIT = re.compile(r"%|(?:[A-Za-z]{1,8} )?[A-Za-zµμ][A-Za-zµμ]{0,15}(?: ?/ ?[A-Za-z]{1,10}){0,2}")
_DASHES = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-"))
_BLANKS = str.maketrans({**dict.fromkeys("\u00a0\u2007\u2009\u202f\u2002\u2003\t", " "), "\u200b": "", "\ufeff": ""})


@dataclass(frozen=True)
class Printed:
    """A printed number: its exact `value`, and `quantum`, the value of its last digit, both in `unit` as printed."""

    value: Fraction
    quantum: Fraction
    unit: str | None
    text: str

    def says(self, figure: Fraction) -> bool:
        """Whether `figure`, in the same unit, gives this number when rounded or truncated to as many digits.

        Of a number printed in full, with the 16 digits of a machine, twelve must agree.
        """
        away = figure - self.value
        cut_off = away if self.value > 0 or (self.value == 0 and figure >= 0) else -away
        return abs(away) * 2 <= self.quantum or 0 <= cut_off < self.quantum or abs(away) * 10**12 <= abs(figure)

    @property
    def range(self) -> tuple[Fraction, Fraction]:
        """The lowest and the highest figure that gives this number when rounded or truncated."""
        return self.value - self.quantum / 2, self.value + self.quantum

    def show(self, figure: Fraction) -> str:
        """`figure` with one more decimal than this number, at least two."""
        places = _decimals(self.quantum)
        return show(figure, max(2, places + (places < 2)))


def show(figure: Fraction, digits: int) -> str:
    """`figure` with `digits` decimals, rounded half up."""
    scaled = abs(figure) * 10**digits
    whole = (scaled.numerator * 2 + scaled.denominator) // (2 * scaled.denominator)
    if whole >= 10**30:
        return f"{float(figure):.6g}" if abs(figure) < 10**300 else "beyond 1e300"
    text = str(whole).rjust(digits + 1, "0")
    sign = "-" if figure < 0 and whole else ""
    return sign + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)


def read_printed(text: str) -> Printed | str:
    """The number in a cell, or why it has none that can be checked; "blank" for an empty cell."""
    if len(text) > 400:
        return "is too long for a number"
    bare = _bare(text)
    if bare in ("", "-", "--", "---", "n/a", "N/A", "NA", "?", "TBD", "tbd", "/"):
        return "blank"
    if "~~" in text or re.search(r"</?(?:s|del|strike)>", text):
        return "is struck out"
    if re.match(r"[~≈<>≤≥]|(?:about|approx|ca|circa|over|under|up to|at least|at most)\b", bare, re.IGNORECASE):
        return "is approximate"
    if "±" in bare or "+/-" in bare or "+-" in bare:
        return "has a spread"
    match = _NUMBER.match(bare)
    if match is None:
        return "has no number" if not re.match(r"[+-]?\d", bare) else "is beyond any figure of a run"
    rest = match["rest"].strip()
    if len(match.group()) < len(bare) or re.match(r"\d", rest):
        return "is beyond any figure of a run" if re.match(r"[\d.,eE+-]+$", bare) else "is more than a number"
    # A remark without a figure, as in "16 (peak)", does not change the number.
    rest = re.sub(r"\([^()\d]{0,40}\)$", "", rest).strip()
    if re.match(r"(?:-|to\b|\.\.)\s*[\d.]", rest):
        return "is a range"
    if re.match(r",\s*\d", rest):
        return "has a comma that may be a decimal point"
    if rest and _UNIT.fullmatch(rest) is None:
        return "is more than a number"
    exponent = int(match["exponent"] or 0)
    digits = match["digits"].replace(",", "")
    if abs(exponent) > _LARGEST_EXPONENT or len(digits) > _LONGEST:
        return "is beyond any figure of a run"
    value = Fraction(Decimal(f"{match['sign']}{digits}"))
    places = len(digits.partition(".")[2])
    scale = Fraction(10) ** exponent
    return Printed(value * scale, scale / 10**places, rest or None, bare)


def _bare(text: str) -> str:
    """The cell without the Markdown and HTML around a number."""
    text = text.translate(_BLANKS).translate(_DASHES).replace("&nbsp;", " ").replace("&thinsp;", " ")
    text = re.sub(r"</?[A-Za-z][^<>]{0,80}>", " ", text)
    text = re.sub(r"\[\^[^\]]{1,20}\]", "", text)
    text = re.sub(r"\[([^\[\]]{1,80})\]\([^()\s]{0,200}\)", r"\1", text)
    text = re.sub(r"[*`_]{1,3}(?=\S)|(?<=\S)[*`†‡]{1,3}", "", text.strip())
    text = re.sub(r"(?<=\d)[_'’](?=\d{3}(?:\D|$))", "", text)
    if re.fullmatch(r"\d{1,3}(?: \d{3}){1,8}(?:\.\d{1,30})?", text.strip()):
        text = text.replace(" ", "")
    return text.strip()


def _decimals(quantum: Fraction) -> int:
    places = 0
    while quantum < 1 and places < 40:
        quantum, places = quantum * 10, places + 1
    return places
