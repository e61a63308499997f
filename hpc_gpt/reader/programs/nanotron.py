"""nanotron: one line per iteration, its figures rounded to three digits with K, M, B (before 2024 G) and T.

`global_batch_size` is in samples if the time is called `elapsed_time_per_iteration_ms`, in tokens if it is called
`time_per_iteration_ms` (since March 2025). 1.02K samples may be 1,020 or 1,024: only a batch without a suffix is read.
"""

from hpc_gpt.reader.lines.pattern import END, INT, SHORT, STEP, Dialect, Pattern, figures

_ITERATION = rf"\biteration: {STEP} / (?P<steps_planned>\d{{1,12}})(?= \|)"
_COLUMNS = (
    " consumed_tokens tokens_per_s=tokens_per_sec tokens_per_s_gpu=tokens_per_sec_per_gpu loss=lm_loss lr"
    " tflops=model_tflops_per_gpu"
)

# A line of the configuration follows the tag: a program that logs its own source has the same text without one.
_TAG = r"\[INFO\|DP=[^\]\n]{1,60}\]: [^\n]{0,300}?"

DIALECT = Dialect(
    name="nanotron",
    engine="nanotron",
    flags=("nanotron rounds its figures to three digits",),
    patterns=(
        figures(
            _ITERATION,
            "| elapsed_time_per_iteration_ms: ",
            "step_ms=elapsed_time_per_iteration_ms global_batch=global_batch_size grad_norm$" + _COLUMNS,
        ),
        figures(_ITERATION, "| time_per_iteration_ms: ", "step_ms=time_per_iteration_ms grad_norm" + _COLUMNS),
        figures(
            rf"\bmbs: (?P<micro_batch>{INT}) \| grad_accum: (?P<micro_batches>{INT})(?= \|)",
            " | grad_accum: ",
            "cp seq=sequence_length global_batch=global_batch_size steps_planned=train_steps",
            kind="fact",
        ),
        # The configuration as pprint prints it: one argument per line.
        Pattern("fact", r"\bParallelismArgs\(dp=(?P<dp>\d{1,6})(?=,\s*$)"),
        *(
            Pattern("fact", _TAG + rf"(?<=[ (]){name}=(?P<{fact}>\d{{1,12}})(?=\){{0,4}},\s*$)", literal=f"{name}=")
            for name, fact in (
                ("pp", "pp"),
                ("tp", "tp"),
                ("context_parallel_size", "cp"),
                ("sequence_length", "seq"),
                ("micro_batch_size", "micro_batch"),
                ("batch_accumulation_per_replica", "micro_batches"),
                ("hidden_size", "hidden"),
                ("intermediate_size", "ffn"),
                ("num_hidden_layers", "layers"),
                ("num_attention_heads", "heads"),
                ("num_key_value_heads", "kv_heads"),
                ("vocab_size", "vocab"),
                ("zero_stage", "zero_stage"),
            )
        ),
        Pattern("fact", _TAG + r"(?<=[ =(])LlamaConfig\(", facts={"model_type": "llama"}),
        *(
            Pattern(
                "fact",
                _TAG + rf"(?<=[ (])tie_word_embeddings={on}(?=\){{0,4}},\s*$)",
                facts={"untied_embeddings": on == "False"},
            )
            for on in ("True", "False")
        ),
        Pattern("fact", _TAG + r"(?<=[ (])dtype=torch\.(?P<dtype>\w{1,12})(?=\){0,4},\s*$)"),
        *(
            Pattern(
                "fact",
                _TAG + rf"(?<=[ (])recompute_layer={on}(?=\){{0,4}},\s*$)",
                facts={"recompute": recompute},
            )
            for on, recompute in (("True", "full"), ("False", "none"))
        ),
        Pattern("fact", rf"\bTotal number of parameters: (?P<params>{SHORT}) \(", weak=True),
        Pattern(
            "memory",
            r"[\] ]Memory usage: \d{1,9}\.\d\dMiB\. Peak allocated:? (?P<memory_allocated_mib>\d{1,9}\.\d\d)MiB"
            r"\.? Peak reserved: (?P<memory_reserved_mib>\d{1,9}\.\d\d)MiB",
        ),
        Pattern("save", r"\bSaving checkpoint at \S" + r"[^\n]{0,400}?(?P<step>\d{1,12})" + END),
    ),
)
