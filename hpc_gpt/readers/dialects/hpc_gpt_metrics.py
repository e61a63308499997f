"""This project's own metrics.jsonl, if it is read without its run folder."""

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern


def _entry(key: str, group: str) -> str:
    return rf"(?=(?:[^{{}}\n]{{0,1000}}?\"{key}\": (?P<{group}>{NUMBER})(?=[,}}]))?)"


DIALECT = Dialect(
    name="hpc_gpt_metrics",
    engine="hpc-gpt",
    patterns=(
        Pattern(
            "step",
            '"loss_eval": ',
            r"\{\"step\": (?P<step>\d{1,12}), \"loss\": (?=[^{}\n]{0,1000}\"time\": [\d.]{1,24}[,}])"
            rf"(?:(?P<loss>{NUMBER})|null)(?=, \"loss_eval\": )"
            + _entry("loss_eval", "loss_eval")
            + _entry("grad_norm", "grad_norm")
            + _entry("lr", "lr")
            + _entry("step_s", "step_s")
            + _entry("tokens_per_s", "tokens_per_s")
            + _entry("memory_allocated_gib", "memory_allocated_gib")
            + _entry("memory_reserved_gib", "memory_reserved_gib")
            + _entry("time", "at"),
        ),
        Pattern(
            "save",
            '"save_s": ',
            rf"\{{\"step\": (?P<step>\d{{1,12}}), \"loss\": [^{{}}\n]{{1,1000}}, \"save_s\": (?P<save_s>{NUMBER}), \"time\": ",
        ),
    ),
    specimen="""\
{"step": 7, "loss": 5.4321, "loss_eval": null, "grad_norm": 1.25, "lr": 0.0003, "step_s": 0.123456, "tokens_per_s": 66361.4, "tokens": 8192, "skipped": false, "memory_allocated_gib": 3.25, "memory_reserved_gib": 4.5, "save_s": null, "time": 1790000000.123}
{"step": 8, "loss": 5.4001, "loss_eval": 5.5001, "grad_norm": 1.25, "lr": 0.0003, "step_s": 0.123456, "tokens_per_s": 66361.4, "tokens": 8192, "skipped": false, "memory_allocated_gib": 3.25, "memory_reserved_gib": 4.5, "save_s": 1.5, "time": 1790000001.123}
{"step": 9, "loss": 5.3001, "loss_eval": 5.4001, "grad_norm": 1.25, "lr": 0.0003, "step_s": 0.123456, "tokens_per_s": 66361.4, "tokens": 8192, "skipped": false, "memory_allocated_gib": 3.25, "memory_reserved_gib": 4.5, "save_s": null, "time": 1790000002.123, "loss_eval_by": {"code": 5.2001, "web": 5.5001}}
""",
    seen="hpc_gpt/train/metrics.py",
)
