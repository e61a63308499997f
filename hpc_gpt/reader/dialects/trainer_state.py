"""Hugging Face's `trainer_state.json`, which a Trainer writes beside each checkpoint: entries of several lines.

An entry of `log_history` begins with its epoch and ends with its step; the entries of an evaluation and of the end have
the epoch of the entry before them. The batch is per device. The step time is the runtime over the steps, as in the log.
"""

from hpc_gpt.reader.pattern import END, NUMBER, START, Dialect, Pattern

_WHOLE = r"\d{1,12}"


def _entry(kind: str, key: str, group: str, number: str = NUMBER, end: str = "," + END) -> Pattern:
    return Pattern(kind, START + rf"\"{key}\": (?P<{group}>{number}){end}", literal=f'"{key}": ', own=True)  # type: ignore[arg-type]


DIALECT = Dialect(
    name="trainer_state",
    engine="hf",
    patterns=(
        Pattern("fact", START + r"\"log_history\": \[" + END, facts={"engine": "hf"}),
        _entry("step", "epoch", "epoch"),
        *(
            _entry("more", key, group)
            for key, group in (
                ("grad_norm", "grad_norm"),
                ("learning_rate", "lr"),
                ("loss", "loss"),
                ("aux_loss", "balance_loss"),
                ("eval_loss", "loss_eval"),
                ("num_input_tokens_seen", "consumed_tokens"),
            )
        ),
        _entry("more", "step", "step", _WHOLE, ",?" + END),
        *(
            _entry("total", key, group, NUMBER, ",?" + END)
            for key, group in (
                ("train_runtime", "runtime_s"),
                ("train_samples_per_second", "samples_per_s"),
                ("train_steps_per_second", "steps_rounded"),
                ("train_loss", "loss_mean"),
            )
        ),
        *(
            _entry("fact", key, group, _WHOLE)
            for key, group in (
                ("logging_steps", "log_interval"),
                ("max_steps", "steps_planned"),
                ("num_train_epochs", "epochs"),
            )
        ),
        _entry("fact", "train_batch_size", "micro_batch", _WHOLE, ",?" + END),
    ),
)
