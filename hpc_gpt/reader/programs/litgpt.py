"""litgpt and lit-gpt. An `iter` is one micro-batch, and so is its time: no step time is taken from it.

Its training time includes evaluations and saves, so the steps are not timed by it either.

Only the first line of a step is read: its loss is that of the first micro-batch.
"""

from hpc_gpt.reader.lines.pattern import INT, NUMBER, START, STEP, Dialect, Pattern, figures, has, line

# The model's and the training's configuration, each printed as one dict, which a key identifies.
_CONFIGURATION = {
    "padded_vocab_size": {
        "block_size": "seq", "padded_vocab_size": "vocab", "n_layer": "layers", "n_head": "heads",
        "n_query_groups": "kv_heads", "n_embd": "hidden",
    },
    "eval_iters": {
        "micro_batch_size": "micro_batch", "gradient_accumulation_steps": "micro_batches",
        "gradient_accumulation_iters": "micro_batches", "devices": "gpus_said",
    },
}  # fmt: skip

DIALECT = Dialect(
    name="litgpt",
    engine="litgpt",
    flags=("litgpt times micro-batches, not steps; its loss is that of a step's first micro-batch",),
    patterns=(
        figures(
            rf"\biter \d{{1,12}} step {STEP}(?= \|)" + has(rf"\| iter time: {NUMBER} ms"),
            " iter time: ",
            "loss=loss_train loss_eval=val",
        ),
        figures(
            rf"\biter \d{{1,12}}(?: \|)? step {STEP}(?=:)" + has("[:,] loss ", rf" (?:iter|train) time: {NUMBER} ?ms"),
            "iter ",
            "loss$",
        ),
        # lit-llama counts micro-batches only.
        figures(
            r"\biter \d{1,12}(?=:)" + has("[:,] loss ", rf"[:,] time: {NUMBER} ?ms(?:,|\s*$)"),
            "iter ",
            "loss$",
        ),
        line("eval", "iter {}: val loss {loss_eval}, val time: ", weak=True),
        line("eval", "step {}: val loss {loss_eval}, val time: ", weak=True),
        line("eval", "Final evaluation | val loss: {loss_eval} | val ppl: "),
        Pattern("fact", START + r"Loading model (?:'[^'\n]{1,400}' )?with \{'", facts={"engine": "litgpt"}),
        Pattern("fact", START + r"FLOPs not found for '(?P<device>[^'\n]{2,60})'"),
        *(
            Pattern(
                "fact",
                rf"^(?=[^\n]{{0,6000}}'{mark}': )[^\n]{{0,6000}}?[{{ ]'{key}': (?P<{group}>\d{{1,9}})(?=[,}}])",
                literal=f"'{key}': ",
            )
            for mark, keys in _CONFIGURATION.items()
            for key, group in keys.items()
        ),
        *(
            Pattern("fact", START + rf"{total}:? (?P<params>{INT})(?=\s*$)", weak=True)
            for total in ("Total parameters", "Total Parameters")
        ),
        Pattern("total", rf"\| - Training Time : (?P<whole_s>{NUMBER}) s(?=\s*$)"),
        Pattern("total", START + rf"Training time: (?P<whole_s>{NUMBER})s(?=\s*$)", weak=True),
        Pattern("memory", rf"\bMemory (?:used|Used {{1,6}}): (?P<memory_allocated_gb>{NUMBER}) GB", weak=True),
    ),
)
