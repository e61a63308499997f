"""Hugging Face's Trainer and the programs built on it: TRL, axolotl, LLaMA-Factory, Unsloth, ms-swift.

Lines of metrics have an epoch but no step number: the step follows from `logging_steps`, which becomes `log_interval`.
Every rank or every node prints the final summary: totals are taken once. The model's shape is printed as it was loaded,
before `--config_overrides` changes it: the overrides win. Under ZeRO-3 the scripts print `Total size=0.00M params`, which
is not read. Unsloth's header counts the parameters of adapters, so it is not read either. ms-swift's memory is reserved;
its `train_speed` is a mean since the start. `train_steps_per_second` has three decimals (0.017 for 57.44 s per step): no step time is taken from it, as
the runtime over the steps is exact, but it may show how many steps there were.
"""

from collections.abc import Callable, Mapping
from typing import Any

from hpc_gpt.reader.lines.fields import Fields
from hpc_gpt.reader.lines.pattern import CLOCK, END, INT, NUMBER, STEP, Dialect, Pattern, figures, line, settings

_SHAPE = {
    "hidden": ("n_embd", "hidden_size"),
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("n_inner", "intermediate_size"),
    "vocab": ("vocab_size",),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "qk_nope": ("qk_nope_head_dim",),
    "qk_rope": ("qk_rope_head_dim",),
    "v_head": ("v_head_dim",),
}
_KEYS = (
    "|".join(name for names in _SHAPE.values() for name in names)
    + "|n_positions|gradient_checkpointing|tie_word_embeddings|n_shared_experts|decoder_sparse_step"
)
_PROGRESS = (
    r"(?=(?:[^{}\n]{0,1500}?'(?:(?:global_step/max_steps|iteration)': '|step': '?)(?P<step>\d{1,12})"
    r"(?:/(?P<steps_planned>\d{1,12})')?(?='?[,}]))?)"
    r"(?=(?:[^{}\n]{0,1500}?'(?:elapsed_time|train_runtime)': '?(?P<elapsed_s>[\dhdms. ]{2,24})(?=[',}]))?)"
)
_HEADER = {
    "Num examples": "samples_per_epoch", "Num Epochs": "epochs", "Instantaneous batch size per device": "micro_batch",
    "Gradient Accumulation steps": "micro_batches", "Total optimization steps": "steps_planned",
}  # fmt: skip
_EPOCH = "epoch grad_norm lr=learning_rate"
_FIGURES = f"""
    {_EPOCH} consumed_tokens=num_input_tokens_seen|num_tokens|tokens/total tokens_per_s=step_tokens_per_second
    tokens_per_s_gpu=tokens/train_per_sec_per_gpu|tokens_per_second_per_gpu step_s=step_time
    memory_allocated_gib=memory/max_allocated(GiB)|memory/max_allocated_(GiB)|memory/max_allocated(gib)
    memory_allocated_gib=memory/max_mem_allocated(GiB)|memory/max_mem_allocated_(GiB)|memory/max_mem_allocated(gib)
    memory_reserved_gib=memory(GiB)|memory/device_reserved_(GiB)|memory/device_mem_reserved(gib)
    memory_reserved_gib=memory/device_mem_reserved_(GiB)|memory/device_mem_reserved(GiB)|memory/device_reserved(gib)
    memory_allocated_mib=total_peak_memory_allocated_MB memory_reserved_mib=total_peak_memory_reserved_MB
    balance_loss=aux_loss|load_balancing_loss|seq_load_balancing_loss|global_load_balancing_loss z_loss
"""  # the last line: TRL's, and that of ms-swift under Megatron
_BLOCKS = ("block_size", "max_seq_length", "max_seq_len", "cutoff_len")
_LONGEST_BLOCK = 1024  # the default block of text of the example scripts


def _quoted(group: str) -> str:
    """Matches a whole value of a dict; transformers 5 puts it in quotes."""
    return rf"'?(?P<{group}>{NUMBER})'?(?=[,}}])"


def _settings(literal: str, keys: str) -> Pattern:
    """Entries of the TrainingArguments, all on one line or one on each line."""
    return Pattern("argument", rf"(?:^|[ (:\]])(?P<key>{keys})=(?P<value>[\w.-]{{1,20}})(?=,|\))", literal=literal)


def _option(name: str) -> Pattern:
    return Pattern("argument", rf"(?P<key>--{name})[ =](?P<value>\d{{1,12}})(?=[\s'\"\\])", literal=f"--{name}")


def _shape(literal: str, weak: bool = False) -> Pattern:
    """A line of the model's configuration as JSON. The key keeps its quotes: other dumps use the bare name. The keys are
    sorted, so only the vocabulary can be last and have no comma. Programs after nanoGPT also use GPT-2's keys."""
    return Pattern(
        "argument",
        rf"(?P<key>\"(?{'=' if weak else '!'}n_(?:embd|layer|head|kv_head)\")(?:{_KEYS})\"): "
        r"(?P<value>\d{1,12}|true|false)(?=,)",
        literal=literal,
        weak=weak,
    )


def _interpret(arguments: Mapping[str, str]) -> Fields:
    facts: Fields = {}

    def value(*names: str) -> str | None:
        """The override (`n_embd=`), else the configuration (`"n_embd"`)."""
        texts = [arguments.get(form) for form in (*(f"{n}=" for n in names), *(f'"{n}"' for n in names))]
        return next((candidate for candidate in texts if candidate is not None), None)

    for fact, names in _SHAPE.items():
        text = value(*names)
        if text is not None and text.isdecimal():
            facts[fact] = int(text)
    facts |= _experts(facts, value)
    if (kind := arguments.get('"model_type"')) and not any(
        f'"{of}_config"' in arguments for of in ("text", "vision", "audio")
    ):
        facts |= {"model_type": kind, "untied_embeddings": arguments.get('"tie_word_embeddings"') == "false"}
    blocks = [arguments.get(form) for name in _BLOCKS for form in (f"--{name}", name)]
    block = next((candidate for candidate in blocks if candidate is not None and candidate.isdecimal()), None)
    if block is not None:
        facts["seq"] = int(block)
    elif (positions := value("n_positions")) is not None and positions.isdecimal():
        facts["seq"] = min(int(positions), _LONGEST_BLOCK)
    for dtype in ("bf16", "fp16"):
        if "True" in (arguments.get(dtype), arguments.get(f"--{dtype}")):
            facts["dtype"] = dtype
    recompute = value("gradient_checkpointing") or arguments.get("gradient_checkpointing")
    if recompute is not None:
        facts["recompute"] = "full" if recompute.lower() == "true" else "none"
    for name, fact in (
        ("per_device_train_batch_size", "micro_batch"),
        ("gradient_accumulation_steps", "micro_batches"),
        ("logging_steps", "log_interval"),
        ("zero_stage", "zero_stage"),
        ("max_steps", "steps_planned"),
    ):
        text = arguments.get(f"--{name}", arguments.get(name))
        if text is not None and text.isdecimal():
            facts[fact] = int(text)
    return facts


def _experts(facts: Mapping[str, Any], value: Callable[[str], str | None]) -> Fields:
    """The sizes that DeepSeek's and Qwen's configurations state by two entries."""

    def whole(name: str) -> int:
        text = value(name)
        return int(text) if text is not None and text.isdecimal() else 0

    sizes: Fields = {}
    if (shared := whole("n_shared_experts")) and "expert_ffn" in facts:
        sizes["shared_ffn"] = shared * facts["expert_ffn"]
    if (every := whole("decoder_sparse_step")) > 1 and "layers" in facts:
        sizes["dense_layers"] = facts["layers"] - facts["layers"] // every
    if value("shared_expert_intermediate_size") is not None:
        sizes["shared_gate"] = 1  # Qwen's
    return sizes


DIALECT = Dialect(
    name="hf_trainer",
    engine="hf",
    interpret=_interpret,
    flags=("the program counts trainable parameters only",),
    patterns=(
        figures(
            rf"\{{(?=[^{{}}\n]{{0,3000}}\}})(?:[^{{}}\n]{{0,1500}}?, )?'loss': {_quoted('loss')}"
            # Most lines have none of these: one search finds that out.
            rf"(?:(?=[^{{}}\n]{{0,1500}}?'(?:global_step|step'|iteration|elapsed|train_runtime)){_PROGRESS})?",
            "'loss': ",
            _FIGURES,
            until="}",
        ),
        # ms-swift under Megatron, which may split the model in any way.
        Pattern("fact", r"'iteration': '\d{1,12}/\d{1,12}'(?=[,}])", facts={"engine": "megatron-swift"}),
        # ms-swift's own log.
        figures(
            rf"\{{(?=[^{{}}\n]{{0,3000}}\}})\"loss\": (?P<loss>{NUMBER}), (?=[^{{}}\n]{{0,1500}}?\"train_speed\((?:iter/s|s/it)\)\": )"
            r"(?=(?:[^{}\n]{0,1500}?\"(?:step\": |(?:global_step/max_steps|iteration)\": \")(?P<step>\d{1,12})(?=[,}/]))?)"
            + _PROGRESS.replace("'", '\\"').replace("P<step>", "P<step_of>").replace("step_of", "of"),
            '"train_speed(',
            f"{_EPOCH} memory_reserved_gib=memory(GiB) balance_loss=aux_loss",
            until="}",
        ),
        # LLaMA-Factory's own log has the same figures.
        figures(
            rf"\{{\"current_steps\": {STEP}, \"total_steps\": (?P<steps_planned>\d{{1,12}}), (?=[^{{}}\n]{{0,2000}}\}})"
            rf"(?=(?:[^{{}}\n]{{0,500}}?\"elapsed_time\": \"(?P<elapsed_s>{CLOCK})\")?)",
            '{"current_steps": ',
            "loss lr=lr|learning_rate epoch",
            until="}",
        ),
        figures(
            rf"\{{(?=[^{{}}\n]{{0,3000}}\}})(?:[^{{}}\n]{{0,1500}}?, )?'eval_loss': {_quoted('loss_eval')}",
            "'eval_loss': ",
            "eval_s=eval_runtime",
            kind="eval",
            until="}",
        ),
        figures(
            rf"\{{(?=[^{{}}\n]{{0,3000}}\}})(?:[^{{}}\n]{{0,1500}}?, )?\"eval_loss\": (?P<loss_eval>{NUMBER})(?=[,}}])",
            '"eval_loss": ',
            "eval_s=eval_runtime",
            kind="eval",
            until="}",
        ),
        Pattern("total", rf"\{{(?=[^{{}}\n]{{0,3000}}\}})'train_runtime': {_quoted('runtime_s')}"),
        Pattern(
            "total", rf"^\{{\"train_runtime\": (?P<runtime_s>{NUMBER})(?=, )", literal='{"train_runtime": ', weak=True
        ),
        # The block of metrics at the end: it always has two decimals of a second, so a cut shows.
        Pattern(
            "total", r"\btrain_runtime {1,40}= {0,40}(?P<runtime_s>(?:\d{1,4} days?, )?\d{1,4}:\d\d:\d\d\.\d\d)" + END
        ),
        Pattern("fact", rf"\btrain_samples {{1,40}}= {{0,40}}(?P<samples_per_epoch>{INT})" + END),
        Pattern("eval", rf"\beval_loss {{1,40}}= {{0,40}}(?P<loss_eval>{NUMBER})" + END),
        # The header.
        line("start", "***** Running training *****", weak=True),
        *settings("NAME = FIELD", _HEADER, r"(?<!\| )(?<!\|    )\b"),
        line("fact", "Total train batch size (w. parallel, distributed & accumulation) = {global_batch}"),
        Pattern("fact", rf"(?<!-\"     )\bNumber of trainable parameters = (?P<params_trainable>{INT})" + END),
        Pattern(
            "fact",
            rf"\bTrainable parameters = (?P<params_trainable>{INT}) of (?P<params>\d{{1,3}}(?:,\d{{3}}){{2,9}}) \([\d.]{{1,7}}% trained\)",
        ),
        Pattern(
            "fact",
            r"\bmodel_parameter_info['\"]?: ['\"]?\w{1,80}: (?P<params_millions>\d{1,9}\.\d{1,6})M Params "
            r"\((?P<params_trainable_millions>\d{1,9}\.\d{1,6})M Trainable \[",
        ),
        # Unsloth's header, beside its drawing.
        Pattern("start", rf"\bNum GPUs(?: used)? = (?P<gpus>{INT})" + END, literal="Unsloth - 2x faster"),
        Pattern("fact", rf"/\| {{1,8}}(?P<device>[^|\n]{{2,60}}?)\. Num GPUs = (?P<gpus>{INT})\. Max memory: "),
        Pattern(
            "fact",
            rf"/\| {{1,8}}Num examples = (?P<samples_per_epoch>{INT}) \| Num Epochs = "
            rf"(?:(?P<epochs>{INT}) \| Total steps = (?P<steps_planned>{INT})" + END + ")?",
        ),
        Pattern(
            "fact",
            rf"\\ {{1,8}}Batch size per device = (?P<micro_batch>{INT}) \| Gradient [Aa]ccumulation steps = (?P<micro_batches>{INT})"
            + END,
        ),
        Pattern(
            "fact",
            rf"/ {{1,8}}(?:Data Parallel GPUs = {INT} \| )?Total batch size(?: \([\dx ]{{1,40}}\))? = (?P<global_batch>{INT})"
            rf"(?: \| Total steps = (?P<steps_planned>{INT}))?" + END,
        ),
        line("fact", "trainable params: {params_trainable} || all params: {params} || trainable%"),
        line("fact", "Continuing training from global step {resumed_step}"),
        Pattern(
            "fact",
            rf"\bResuming training from checkpoint with epoch {INT} and global step (?P<resumed_step>\d{{1,12}})" + END,
        ),
        Pattern("save", r"\bSaving model checkpoint to \S{1,400}checkpoint-(?P<step>\d{1,12})" + END),
        line("end", "Training completed. Do not forget", ended="done"),
        Pattern("fact", r"\bUsing \w{1,20} (?P<dtype>fp16|bf16) backend"),
        Pattern(
            "fact",
            r"\bUsing deepspeed: \{[^\n]{0,3000}?'zero_optimization': \{[^{}\n]{0,1000}?'stage': (?P<zero_stage>\d)\b",
        ),
        Pattern("fact", r"\bDetected DeepSpeed ZeRO-(?P<zero_stage>\d):", facts={"engine": "hf-deepspeed"}),
        *(
            Pattern(
                "argument", rf"(?<![\w-])(?P<key>(?:{_KEYS}|n_ctx)=)(?P<value>\w{{1,20}})(?=[,\s'\"])", literal=literal
            )
            for literal in ("--config_overrides", "Overriding config: ")
        ),
        _shape('"n_'),
        _shape('"n_', weak=True),
        *map(_shape, ('_rank": ', '_head_dim": ', '"first_k_dense_', '"decoder_sparse_')),
        *map(_shape, ('"num_', '_size": ', '"head_dim": ', '"tie_word_', '"gradient_checkpointing')),
        Pattern("argument", r"(?P<key>\"vocab_size\"): (?P<value>\d{1,12})" + END, literal='"vocab_size": ', weak=True),
        Pattern(
            "argument", r"(?P<key>\"model_type\"): \"(?P<value>[\w-]{1,40})\"(?=,)", literal='"model_type": ', weak=True
        ),
        # Attention over a window, as `reader.runs.figures._window` reads it.
        *(
            Pattern(
                "argument", rf"(?P<key>\"{key}\"): (?P<value>\d{{1,12}}|true|false|null)(?=,|\s*$)", literal, weak=True
            )
            for key, literal in (
                ("(?:use_sliding_window|sliding_window|window_size)", "window"),
                ("attention_chunk_size", "attention_chunk_size"),
            )
        ),
        # A model of several parts: it is not read which sizes belong to which part.
        Pattern("argument", r"(?P<key>\"(?:text|vision|audio)_config\"): (?P<value>\{)", literal='_config": {'),
        _settings("_steps=", "logging_steps|gradient_accumulation_steps|max_steps|eval_steps|save_steps"),
        _settings("per_device_train_batch_size=", "per_device_train_batch_size"),
        _settings("gradient_checkpointing=", "gradient_checkpointing"),
        _settings("max_seq_length=", "max_seq_length"),
        _settings("16=", "fp16|bf16"),
        *map(
            _option,
            (*_BLOCKS, "logging_steps", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
        ),
        _option("zero_stage"),
        *(
            Pattern("argument", rf"(?P<key>--{name})[ =](?P<value>True)(?=[\s'\"\\])", literal=f"--{name}")
            for name in ("bf16", "fp16")
        ),
    ),
)
