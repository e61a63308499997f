"""verl: a line per step with all metrics. Its loss is the policy's, its throughput tokens/s per GPU, its memory in GiB.

A step also generates and scores its samples. The tokens per step vary. Its batch counts prompts, and the lengths in its
configuration are the longest ones: no sequence length is read. The configuration is printed as by Python's pprint, or in
the command of a shell; a pool of 0 nodes is not used.
"""

from collections.abc import Mapping

from hpc_gpt.reader.pattern import Arguments, Dialect, Fields, Pattern, entries, later, line, without_unknown

_METRICS = {
    "actor/pg_loss": "loss", "actor/grad_norm": "grad_norm", "actor/lr": "lr", "timing_s/step": "step_s",
    "(?:actor/)?perf/max_memory_allocated_gb": "memory_allocated_gib",
    "(?:actor/)?perf/max_memory_reserved_gb": "memory_reserved_gib",
}  # fmt: skip
_NAME, _WITHIN = r" - NAME:(?:np\.\w{1,12}\()?", r"[^\n]{0,20000}?"
_SETTINGS = "train_batch_size|n_gpus_per_node|nnodes|ppo_micro_batch_size_per_gpu|enable_gradient_checkpointing"


def _interpret(texts: Mapping[str, str]) -> Fields:
    arguments = Arguments(texts)
    return without_unknown(
        {
            "global_batch": arguments.whole("train_batch_size"),
            "micro_batch": arguments.whole("ppo_micro_batch_size_per_gpu"),
            "gpus_per_node": arguments.whole("n_gpus_per_node"),
            "nodes": arguments.whole("nnodes"),
            "recompute": {True: "full", False: "none", None: None}[arguments.true("enable_gradient_checkpointing")],
        }
    )


DIALECT = Dialect(
    name="verl",
    engine="verl",
    interpret=_interpret,
    flags=("a step of verl also generates its samples; its loss is the policy's",),
    patterns=(
        Pattern(
            "step",
            r"\bstep:(?P<step>\d{1,12})(?= - [^\n]{0,20000}? - timing_s/step:)"
            + entries(_NAME, _METRICS, r"\)?(?= - )", _WITHIN)
            + later(_NAME.replace("NAME", "perf/throughput"), "tokens_per_s_gpu", r"\)?(?= - |\s*$)", within=_WITHIN),
            literal="timing_s/step:",
        ),
        *(
            Pattern(
                "argument",
                before + rf"(?P<key>{_SETTINGS}){between}(?P<value>(?!0\b)\w{{1,12}}){after}",
                literal=literal,
            )
            for literal, before, between, after in (  # the lines of Ray's actors are labelled
                (" pid=", r"(?<=[{ ]')", "': ", r"(?=[,}])"),
                ("actor_rollout_ref.", r"(?<=[\w]\.)", "=", r"(?=\s)"),
            )
        ),
        line("fact", "Total training steps: {steps_planned}", weak=True),
    ),
)
