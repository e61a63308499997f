"""nanochat. Its loss is smoothed and bias-corrected; tokens/s are the job's; steps count from 0.

`total time` begins after the tenth step, so it is not read. `mfu` is a percentage, printed without its sign.
"""

from collections.abc import Mapping

from hpc_gpt.reader.lines.arguments import Arguments, without_unknown
from hpc_gpt.reader.lines.fields import Fields
from hpc_gpt.reader.lines.pattern import (
    END,
    INT,
    LINE_START,
    NUMBER,
    OF_STEPS,
    START,
    STEP,
    Dialect,
    Pattern,
    figures,
    has,
    line,
    settings,
)

_SIZES = {
    "Vocab size": "vocab",
    "num_layers": "layers",
    "model_dim": "hidden",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
}
_MODEL = {"sequence_len": "seq", "n_layer": "layers", "n_head": "heads", "n_kv_head": "kv_heads", "n_embd": "hidden"}


def _interpret(texts: Mapping[str, str]) -> Fields:
    """The model's configuration, printed as JSON."""
    arguments = Arguments(texts)
    return without_unknown(
        {field: arguments.whole(f'"{name}"', f"'{name}'") for name, field in {**_MODEL, "vocab_size": "vocab"}.items()}
    )


DIALECT = Dialect(
    name="nanochat",
    dtype="bf16",
    engine="nanochat",
    interpret=_interpret,
    flags=("nanochat's printed loss is smoothed over steps",),
    patterns=(
        # Unlike build-nanogpt it prints the share of steps that are done, or the multiplier of the learning rate.
        figures(
            rf"\bstep {STEP}(?:{OF_STEPS})?"
            rf"(?: \({NUMBER}%\) \||(?= \| [^\n]{{0,400}}\| lrm: ))(?=[^\n]{{0,400}}? loss: )",
            "tok/sec: ",
            "loss grad_norm step_ms[ms]=dt tokens_per_s=tok/sec mfu_percent=mfu|bf16_mfu|fp8_mfu",
        ),
        # The last stage prints neither time nor rate.
        figures(rf"\bStep {STEP}{OF_STEPS}{has('lrm: ')} \| ", "| Training loss: ", "loss=Training_loss"),
        *(
            Pattern(
                "argument",
                LINE_START + rf"(?P<key>\"{name}\"): (?P<value>\d{{1,9}})(?=,?\s*$)",
                literal=f'"{name}": ',
                weak=True,
            )
            for name in _MODEL
        ),
        # A stage that continues another one loads its model.
        Pattern(
            "argument",
            rf"(?P<key>'(?:{'|'.join((*_MODEL, 'vocab_size'))})'): (?P<value>\d{{1,9}})(?=[,}}])",
            literal="Building model with config: {'",
        ),
        Pattern(
            "argument",
            LINE_START + r"(?P<key>\"window_pattern\"): (?P<value>\"[SLsl]{1,64}\")(?=,?\s*$)",
            literal='"window_pattern": ',
            weak=True,
        ),
        Pattern(
            "fact", LINE_START + rf"total {{10,24}}: (?P<params>{INT})" + END, literal="total          ", weak=True
        ),
        Pattern("fact", START + rf"Number of parameters: (?P<params>{INT})(?: \(|\s*$)", weak=True),
        *settings("NAME: FIELD", _SIZES, LINE_START, weak=True),
        line("fact", "Total batch size {global_batch_tokens} => gradient accumulation steps: {micro_batches}", START),
        line("fact", "Tokens / micro-batch / rank: {micro_batch} x {seq} = ", START),
        Pattern("fact", START + r"GPU: (?P<device>[^|\n]{1,80}?) \| Peak FLOPS \(BF16\): "),
        line("memory", "Peak memory usage: {memory_allocated_mib}MiB", START, weak=True),
    ),
)
