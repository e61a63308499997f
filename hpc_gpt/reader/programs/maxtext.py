"""MaxText. TFLOP/s and tokens/s are per device. `total_weights` counts the targets of the batch without padding."""

from collections.abc import Mapping

from hpc_gpt.reader.lines.fields import Fields
from hpc_gpt.reader.lines.pattern import NUMBER, STEP, Dialect, Pattern, figures, line

_SETTINGS = {
    "max_target_length": "seq",
    "global_batch_size_to_train_on": "global_batch",
    "base_emb_dim": "hidden",
    "base_num_decoder_layers": "layers",
    "base_num_query_heads": "heads",
    "base_num_kv_heads": "kv_heads",
    "base_mlp_dim": "ffn",
    "vocab_size": "vocab",
    "head_dim": "head_dim",
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "steps": "steps_planned",
    "gradient_accumulation_steps": "micro_batches",
}
# Attention over a window, as `reader.runs.figures._window` reads it.
_WINDOWS = ("sliding_window_size",)


def _interpret(arguments: Mapping[str, str]) -> Fields:
    facts: Fields = {}
    for key, fact in _SETTINGS.items():
        text = arguments.get(f"{key}:", "")
        if text.isdecimal():
            facts[fact] = int(text)
    if (dtype := arguments.get("dtype:", "")) in ("bfloat16", "float32", "float16"):
        facts["dtype"] = dtype
    if (tied := arguments.get("logits_via_embedding:")) is not None:
        facts["untied_embeddings"] = tied == "False"
    if (kind := arguments.get("decoder_block:")) is not None:
        facts["model_type"] = "llama" if kind == "llama2" else kind
    if arguments.get("remat_policy:") == "full":
        facts["recompute"] = "full"
    return facts


DIALECT = Dialect(
    name="maxtext",
    dtype="bf16",
    engine="maxtext",
    interpret=_interpret,
    patterns=(
        figures(
            rf"\bcompleted step: {STEP},",
            "completed step: ",
            "step_s=seconds tflops=TFLOP/s|TFLOP/s/device tokens_per_s_gpu=Tokens/s/device loss$3",
        ),
        Pattern("eval", rf"\b[Cc]ompleted eval after train step (?P<step>\d{{1,12}}), loss=(?P<loss_eval>{NUMBER}),"),
        line("eval", "average loss after step={step}: eval_step_count={}, eval_loss={loss_eval},"),
        line("fact", "Num_devices: {gpus}, shape "),
        # A line of the recipes' runner; the sizes are those of the configuration.
        Pattern(
            "fact",
            r"\btuning params for model are: \{"
            r"(?=(?:[^{}\n]{0,2000}?'per_device_batch_size': (?P<micro_batch>\d{1,6})(?=[,}]))?)"
            r"(?=(?:[^{}\n]{0,2000}?'max_target_length': (?P<seq>\d{1,9})(?=[,}]))?)"
            r"(?=(?:[^{}\n]{0,2000}?'remat_policy': '(?P<recompute>full)')?)",
        ),
        Pattern("fact", rf"\bnumber parameters:? (?P<params_billions>{NUMBER}) billion"),
        Pattern(
            "argument",
            r"\bConfig param (?P<key>(?:dtype|remat_policy|logits_via_embedding|decoder_block|attention_type):) (?P<value>\w{1,40})(?=\s*$)",
        ),
        Pattern(
            "argument",
            rf"\bConfig param (?P<key>(?:{'|'.join((*_SETTINGS, *_WINDOWS))}):) (?P<value>\d{{1,15}})(?=\s*$)",
        ),
    ),
)
