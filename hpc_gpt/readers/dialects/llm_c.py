"""llm.c and its PyTorch reference. The first step includes set-up. The MFU is -100 % on a GPU that its table lacks."""

from hpc_gpt.readers.pattern import END, LINE_START, NUMBER, START, Dialect, Pattern, later

_STEP = r"\bstep {1,8}(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12})"
_Z = r"(?: ?\((?:z )?[+-]?(?:\d{1,9}\.\d\d|nan|inf)z?\))?"


def _row(name: str, group: str, number: str = r"\d{1,20}") -> Pattern:
    """A row of the parameter table that it prints first."""
    return Pattern("fact", f"| {name}", START + rf"\| {name} {{1,24}}\| (?P<{group}>{number}) {{0,60}}\|")


DIALECT = Dialect(
    name="llm_c",
    engine="llm.c",
    patterns=(
        Pattern(
            "step",
            " tok/s",
            rf"{_STEP} \|(?=[^\n]{{0,400}}\d tok/s)"
            + later(r" loss {1,12}", "loss", rf"(?={_Z} ?\|)")
            + later(r"\| norm {1,12}", "grad_norm", rf"(?={_Z} ?\|)")
            + later(r"\| lr ", "lr")
            + later(r"\| \(? {0,8}", "step_ms", r"(?= ms \|)")
            + later(r"\| {1,8}", "mfu_percent", r"(?=% [\w ]{1,20} MFU \|)", r"\d{1,3}\.\d")
            + later(r"\| {1,8}", "tokens_per_s", "(?= tok/s)"),
        ),
        Pattern(
            "step",
            " tok/s)",
            rf"{_STEP}: train loss (?P<loss>{NUMBER})(?: \(acc {NUMBER}\))?(?: norm (?P<grad_norm>{NUMBER}))?"
            rf"(?: lr (?P<lr>{NUMBER}))? \((?P<step_ms>{NUMBER}) ms, (?P<tokens_per_s>{NUMBER}) tok/s\)",
        ),
        Pattern(
            "step",
            " (took ",
            START + rf"step (?P<step>\d{{1,12}}): train loss (?P<loss>{NUMBER}) \(took (?P<step_ms>{NUMBER}) ms\)",
        ),
        Pattern("step", " trl:", START + rf"s:(?P<step>\d{{1,12}}) trl:(?P<loss>{NUMBER})(?= lr:|\s*$)"),
        Pattern("eval", "val loss ", LINE_START + rf"val loss (?P<loss_eval>{NUMBER})" + END, weak=True),
        Pattern("eval", " tel:", START + rf"s:(?P<step>\d{{1,12}}) tel:(?P<loss_eval>{NUMBER})" + END),
        _row("micro batch size B", "micro_batch"),
        _row("sequence length T", "seq"),
        _row("total batch size", "global_batch_tokens"),
        _row("vocab_size V", "vocab_unpadded"),
        _row("padded_vocab_size Vp", "vocab"),
        _row("num_layers L", "layers"),
        _row("num_heads NH", "heads"),
        _row("channels C", "hidden"),
        _row("num_parameters", "params"),
        _row("num_processes", "gpus"),
        _row("zero_stage", "zero_stage"),
        # The header of the CPU's and the first CUDA version.
        *(
            Pattern("fact", f"{name}: ", LINE_START + rf"{name}: (?P<{fact}>\d{{1,15}})" + END, weak=True)
            for name, fact in (
                ("vocab_size", "vocab"),
                ("num_heads", "heads"),
                ("channels", "hidden"),
                ("num_parameters", "params"),
            )
        ),
        _row("device", "device", r"[^|\n]{1,50}?"),
        Pattern("fact", "| precision", START + r"\| precision {1,24}\| BF16 {0,60}\|", facts={"dtype": "bf16"}),
        Pattern(
            "fact",
            "=> setting grad_accum_steps=",
            START + r"=> setting grad_accum_steps=(?P<micro_batches>\d{1,9})" + END,
        ),
        Pattern(
            "memory",
            "peak memory consumption: ",
            START + r"peak memory consumption: (?P<memory_allocated_mib>\d{1,9}) MiB",
            weak=True,
        ),
    ),
)
