"""Every dialect reads its own specimen, and no other does: with whatever before a line, and however it is cut."""

import itertools
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.record import RECORD_KEYS
from hpc_gpt.reader.lines.dialects import dialects
from hpc_gpt.reader.lines.fields import STEP_FACTS, STEP_FIELDS, unit
from hpc_gpt.reader.lines.matches import all_patterns, field_spans, find
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.runs.facts import asked_at
from tests.reader.reading import SPECIMENS, read_lines, specimen_of

PREFIXES = ("12: ", "[default7]:", "[rank0]:", "[2026-11-20 10:00:00] ", "\x1b[2m\x1b[36m[rank3]:\x1b[0m ")
SAID = SPECIMENS.with_name("said_by_specimens.txt")
BY_NAME = {dialect.name: dialect for dialect in dialects()}
# Groups that only hold a place in a pattern.
IGNORED = {"of", "before"}
# Facts that are no keys of a record.
FACTS = set(
    re.findall(
        r"\w+",
        """kv_heads ffn vocab_unpadded vocab_multiple params_of_rank rank_params rank_name steps_planned
    log_interval eval_interval save_interval loss_scale samples_per_epoch epochs gpus_per_node gpus_said
    gpus_unused gpu_index gpu_index_above_7 cp ep vp sequence_parallel flash_attention distributed_optimizer
    optimizer_offload torch_version deepspeed_version framework_version global_batch_tokens
    resumed_step node head_dim experts experts_per_token
    untied_embeddings position_embedding etp expert_ffn shared_ffn layers_listed params_trainable q_lora kv_lora qk_nope
    qk_rope v_head mtp_layers params_estimated params_dense params_sparse
    params_decayed params_not_decayed params_active
    device_batch_now micro_batch_now global_batch_now host_used_percent epoch_said step_saved rank_said
    loss_eval_closing loss_closing""",
    )
)
# A program that prints Megatron's line with more in it: the longer match is its own.
KIN = {("gpt_neox", "megatron")}
# Figures that end a line in some versions, or of some runs, and not in others: where they do not, a cut one cannot be
# told. A line of timers has as many as the program measured.
UNTOLD = {
    "nemo": {"step_s"},
    "megatron": {"forward-compute", "forward-recv", "backward-compute", "forward-backward"},
    "deepspeed": {
        "deepspeed_version",
        *(f"{timer}_microstep" for timer in ("fwd", "bwd", "bwd_inner", "bwd_allreduce")),
    },
    "gpt_neox": {"zero_optimization"},
    "megatron_bridge": {"allocated", "reserved"},
    "mmengine": {"loss"},
    "torchtune": {"loss", "tokens_per_s_gpu", "grad_norm", "reserved"},
}
# The forms of Megatron's line over the years.
PRINTED = Path(__file__).parents[1] / "printed" / "megatron.txt"
MEGATRON = [line[2:] for line in PRINTED.read_text(encoding="utf-8").splitlines() if line.startswith(">  iteration ")]
# Literals that many lines have: of a number of letters that other programs print.
OFTEN = {"raining", "rain", "GPU", "evice", "loss: ", "poch", "oss", "_"}
OTHER_DIGITS = str.maketrans("0123456789", "2345678937")
# A scheduler's own words and ds_report's, which no launcher labels.
ALONE = ("JobId=", "deepspeed info ")


def figures(part: Part) -> set[tuple[str, str, Any]]:
    """Everything a part says, but where and when."""
    found: set[tuple[str, str, Any]] = set()
    for name, facts in part.facts.items():
        found |= {("fact", name, str(fact.value)) for fact in facts}
    for steps in part.steps.values():
        found |= {("step", name, float(value)) for name in steps.columns if name != "at" for value in steps[name]}
    found |= {("total", name, fact.value) for name, fact in part.totals.items()}
    found |= {("argument", key, text) for key, (text, _) in part.arguments.items()}
    found |= {("eval", str(step), loss) for step, loss, _ in part.evals}
    found |= {("progress", str(step), elapsed) for step, elapsed, _ in part.progress}
    found |= {("save", name, value) for step, took, _ in part.saves for name, value in (("step", step), ("s", took))}
    found |= {("params", name, params) for name, (params, _) in part.rank_params.items()}
    found |= {("timer", name, total) for name, (total, _) in part.timers_s.items()}
    for memory in part.memory.values():
        found |= {("memory", "allocated", memory.allocated_gib), ("memory", "reserved", memory.reserved_gib)}
    return {each for each in found if each[2] is not None and each[2] == each[2]}


def read(line: str) -> set[tuple[str, str, Any]]:
    return figures(read_lines("log", [line])[0])


def said(lines: list[str]) -> str:
    """What a log says by kind and name, a line each, with its values in their order."""
    values: dict[tuple[str, str], list[str]] = defaultdict(list)
    for part in read_lines("log", lines):
        values["read", "by"] += [name for name in part.dialects if name not in values["read", "by"]]
        for kind, name, value in sorted(figures(part), key=str):
            values[kind, name].append(f"{value:.7g}" if isinstance(value, float) else str(value))
        for name, fact in asked_at(part).items():
            values["asks for", name].append(str(fact.value))
        for failure in part.failures:
            about = [f"rank {failure.rank}"] * (failure.rank is not None) + [f"on {failure.node}"] * bool(failure.node)
            kind = f"failure{' of another' * failure.echo}"
            values[kind, failure.ended].append(" ".join([*about, failure.message[:60]]))
        values["ended", "as"] += [ended for ended, _ in part.ends]
        values["starts", "of"] += [f"{count} {name}" for name, count in part.starts.items()]
    # A line of several programs, a weak one or one that counts after others only, shows none.
    alone = Counter(name for line in lines for name in read_lines("log", [line])[0].dialects)
    values["alone", "shows"] = [f"{count} {name}" for name, count in sorted(alone.items())]
    return "".join(f"  {kind} {name} = {' | '.join(each)}\n" for (kind, name), each in sorted(values.items()) if each)


LINES = [(dialect, line) for dialect in dialects() for line in specimen_of(dialect.name).splitlines()]


def test_every_group_is_a_field() -> None:
    """A group of a name that nothing knows would be lost without a word."""
    kept = {*STEP_FIELDS, *STEP_FACTS, "memory_allocated_gib", "memory_reserved_gib", "rank"}
    for each in all_patterns():
        figures = {figure.field for every in each.pattern.names.values() for figure in every}
        groups = {unit(name)[0] for name in {*each.regex.groupindex, *figures}} - IGNORED
        if each.pattern.kind in ("step", "more"):
            assert groups <= kept, (each.dialect.name, groups - kept)
        elif each.pattern.kind == "fact":
            assert groups <= kept | {*RECORD_KEYS} | FACTS, (each.dialect.name, groups - kept - {*RECORD_KEYS} - FACTS)
        elif each.pattern.kind == "argument":
            assert {"key", "value"} <= groups, each.pattern


def test_every_dialect_has_patterns_and_a_sourced_specimen() -> None:
    assert {file.stem for file in SPECIMENS.iterdir()} == BY_NAME.keys()
    for dialect in dialects():
        first, *lines = (SPECIMENS / f"{dialect.name}.txt").read_text(encoding="utf-8").splitlines()
        assert dialect.patterns, dialect.name
        assert re.fullmatch("# seen: .+", first), dialect.name
        assert all(lines), dialect.name
    assert len(BY_NAME) == len(dialects())


def test_a_line_of_a_specimen_is_its_dialects_own() -> None:
    wrong = []
    for dialect, line in LINES:
        steps = [each for each in all_patterns() if each.pattern.kind == "step" and each.pattern.literal in line]
        claimed = {each.dialect.name for each in steps if each.regex.search(line)} - {dialect.name, "generic", "epochs"}
        read_by = {each.dialect.name for _, each in find(line) if each.pattern.kind == "step"} - {dialect.name}
        wrong += [(dialect.name, line, other) for other in claimed if (dialect.name, other) not in KIN]
        wrong += [(dialect.name, line, other) for other in read_by]
    assert not wrong


def test_every_dialect_reads_its_specimen_into_known_columns() -> None:
    for dialect in dialects():
        parts = read_lines("log", specimen_of(dialect.name).splitlines())
        assert any(dialect.name in part.dialects for part in parts), dialect.name
        assert {name for part in parts for steps in part.steps.values() for name in steps.columns} <= set(STEP_FIELDS)


def test_each_figure_of_a_specimen_is_read_as_it_stands_there() -> None:
    """Changed by hand, as the specimen is: what a program has printed says the same in every version of ours. Of those
    that are missing there each pattern is in printed/."""
    blocks = re.findall(r"^(\w+)\n((?:  .*\n)*)", SAID.read_text(encoding="utf-8"), re.MULTILINE)
    for name, figures_of_it in blocks:
        dialect = BY_NAME[name]
        own = [("engine", dialect.engine), ("dtype", dialect.dtype), *(("flag", flag) for flag in dialect.flags)]
        of_its_own = "".join(f"  {what} = {text}\n" for what, text in own if text)
        assert of_its_own + said(specimen_of(name).splitlines()) == figures_of_it, name


def test_a_figure_may_have_other_digits() -> None:
    """A line with any one of its figures in other digits is still matched, and has that figure."""
    wrong = []
    for dialect, line in LINES:
        for match, each in find(line):
            spans = field_spans(line, match, each.pattern) if each.pattern.kind not in ("failure", "end") else {}
            for name, (start, end) in spans.items():
                text = line[start:end]
                if name in ("dtype", "key") or "nan" in text:
                    continue
                changed = line[:start] + text.translate(OTHER_DIGITS) + line[end:]
                found = [field_spans(changed, other, each.pattern) for other in each.regex.finditer(changed)]
                if all(other.get(name) != (start, end) for other in found):
                    wrong.append((dialect.name, name, changed))
    assert not wrong


def test_a_pattern_is_tried_on_few_lines_of_others() -> None:
    """What makes a log quick to read: of all lines of specimens at most fifteen have its literal and do not match."""
    for each in all_patterns():
        if each.pattern.kind != "failure" and each.pattern.literal not in OFTEN:
            vain = [line for _, line in LINES if each.pattern.literal in line and not each.regex.search(line)]
            assert len(vain) <= 15, (each.dialect.name, each.pattern.literal)


@pytest.mark.parametrize("name", sorted({dialect.name for dialect, _ in LINES}))
def test_what_precedes_a_line_changes_no_figure(name: str) -> None:
    labelled = [line for dialect, line in LINES if dialect.name == name and not line.startswith(ALONE)]
    prefixed = zip(labelled, itertools.cycle(PREFIXES), strict=False)
    wrong = [(line, prefix) for line, prefix in prefixed if read(prefix + line) != read(line)]
    assert not wrong


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
def test_a_cut_line_gives_no_figure_that_the_whole_line_does_not(every: int) -> None:
    """Except a number at the end of a line: nothing shows that it was cut. For an unknown program, any number."""
    printed = [(BY_NAME["megatron"], line) for line in MEGATRON]
    wrong = []
    for number, (dialect, line) in enumerate([*LINES, *printed]):
        if dialect.last_resort:
            continue
        whole = read(line)
        ending = re.search(r"[\w.,+:-]*[ \t]*$", line)
        assert ending is not None
        for cut in range(number % every, ending.start(), every):
            part = read_lines("log", [line[:cut]])[0]
            if all(BY_NAME[name].last_resort for name in part.dialects):
                continue  # what is left of the line is no dialect's; beside whole lines it does not count
            untold = UNTOLD.get(dialect.name, ())
            wrong += [(line[:cut], each) for each in figures(part) - whole if each[1] not in untold]
    assert not wrong
