"""This project's own metrics.jsonl, if it is read without its run folder."""

from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern


def _entry(key: str, group: str) -> str:
    return rf"(?=(?:[^{{}}\n]{{0,1000}}?\"{key}\": (?P<{group}>{NUMBER})(?=[,}}]))?)"


DIALECT = Dialect(
    name="hpc_gpt_metrics",
    engine="hpc-gpt",
    patterns=(
        Pattern(
            "step",
            r"\{\"step\": (?P<step>\d{1,12}), \"loss\": (?=[^{}\n]{0,1000}\"time\": [\d.]{1,24}[,}])"
            rf"(?:(?P<loss>{NUMBER})|null)(?=, \"loss_eval\": )"
            + _entry("loss_eval", "loss_eval")
            + _entry("grad_norm", "grad_norm")
            + _entry("balance_loss", "balance_loss")
            + _entry("z_loss", "z_loss")
            + _entry("expert_load", "expert_load")
            + _entry("experts_dead", "experts_dead")
            + _entry("lr", "lr")
            + _entry("step_s", "step_s")
            + _entry("tokens_per_s", "tokens_per_s")
            + _entry("memory_allocated_gib", "memory_allocated_gib")
            + _entry("memory_reserved_gib", "memory_reserved_gib")
            + _entry("time", "at"),
            literal='"loss_eval": ',
        ),
        Pattern(
            "save",
            rf"\{{\"step\": (?P<step>\d{{1,12}}), \"loss\": [^{{}}\n]{{1,1000}}, \"save_s\": (?P<save_s>{NUMBER}), \"time\": ",
        ),
    ),
)
