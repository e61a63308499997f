"""The options of all verbs, in one table. A new option is a row of TABLE and a parameter of its verb's function.

`hpc-gpt VERB --help` must load in 0.15 s, so a row imports nothing. The topics of `help` have their --json themselves.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from hpc_gpt.cli import completers
from hpc_gpt.core.errors import ConfigError

# The sections in the help of a verb that has many options.
GROUPS = EXPERIMENT, LAYOUT, SLURM, LENGTH, OTHER, OUTPUT = (
    "Experiment", "Model and layout", "Slurm", "How far", "Other options", "Output",
)  # fmt: skip
_GROUP_BY_TABLE = {"model": LAYOUT, "layout": LAYOUT, "engine": LAYOUT, "job": SLURM}


class CountType(click.types.IntParamType):
    """The value of an option as a whole number, which may end in k, M, B or T: `15T`, `1.5M`, `30e9`."""

    def __init__(self, thousand: int = 1000, least: int | None = None) -> None:
        self._thousand, self._least = thousand, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from hpc_gpt.core.typed_tables import read_count

        try:
            count = read_count(value, self._thousand) if isinstance(value, str) else int(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a whole number, as 4, 8k or 15T.", param, ctx)
        if self._least is not None and count < self._least:
            self.fail(f"{count} is not in the range x>={self._least}.", param, ctx)
        return count


class Rule(NamedTuple):
    """An option excludes other options, or needs one of them. `message` and `hint` are for a line that breaks the rule,
    after `str.format` with {option}, {others} (those on the line, or the first of those needed), and the value of each
    parameter of the verb by its name, such as {steps}."""

    flags: list[str]
    needed: bool
    message: str
    hint: str


def _excludes(
    flags: str, message: str = "{option} and {others} do not go together", hint: str = "leave one of them out"
) -> Rule:
    return Rule(flags.split(), False, message, hint)


def _needs(
    flags: str, message: str = "{option} needs {others}", hint: str = "add {others}, or leave {option} out"
) -> Rule:
    return Rule(flags.split(), True, message, hint)


class Option(click.Option):
    """A row of the table. The `attributes` are those of click's options. A row without type, metavar and default is a
    flag."""

    verbs: list[str]
    key: str
    """The key of the experiment that it sets, such as layout.tp; empty if it sets none."""
    group: str
    """Its section in the help: by default that of its key's table."""
    before_script: bool
    """Whether the verb takes it before a job script. All others belong to experiments."""
    sbatch: str
    """sbatch's letter for it, if the verb's own option has a wider meaning than sbatch's."""
    of_scripts: bool
    """Whether a script may have an option of that name: trainers and launchers take the sizes of a model and of a
    batch, a layout, how they train and how long, and programs that sample take --top."""
    rules: Sequence[Rule]

    def __init__(
        self, flags: str, verbs: str, text: str, *, key: str = "", name: str = "", group: str = "", sbatch: str = "",
        before_script: bool = False, rules: Sequence[Rule] = (), **attributes: Any,
    ) -> None:  # fmt: skip
        name, table = name or key.replace(".", "__") or "as_json" * (flags == "--json"), key.partition(".")[0]
        if not key and attributes.keys().isdisjoint(("type", "metavar", "default", "multiple")):
            attributes["is_flag"] = True
        elif key and "is_flag" not in attributes:
            attributes = {"type": _COUNT} | attributes
        super().__init__([*flags.split(), *([name] if name else [])], help=text, **attributes)
        self.verbs, self.key, self.group = verbs.split(), key, group or _GROUP_BY_TABLE.get(table, OTHER)
        self.before_script, self.sbatch, self.rules = before_script, sbatch, rules
        self.of_scripts = (_GROUP_BY_TABLE.get(table) == LAYOUT and not self.is_flag) or flags in ("--steps", "--top")


def option_name(parameter: click.Parameter) -> str:
    """The usual name of an option, its last long one; EXPERIMENT for the argument."""
    names = [*parameter.opts, *(name for name in parameter.opts if name.startswith("--"))]
    return names[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name


def on_command_line(ctx: click.Context) -> list[click.Parameter]:
    """The parameters that the command line itself gives, not a variable."""
    source = click.core.ParameterSource.COMMANDLINE
    return [each for each in ctx.command.params if ctx.get_parameter_source(str(each.name)) is source]


def check_together(ctx: click.Context) -> None:
    """Raises ConfigError with every rule of the table that the command line breaks."""
    on_line, messages, hints = on_command_line(ctx), list[str](), dict[str, None]()
    with_rules = [each for each in on_line if isinstance(each, Option) and each.rules]
    if not with_rules:
        return
    known = {name: option_name(each) for each in ctx.command.params for name in (*each.opts, option_name(each))}
    given = {name: known[name] for each in on_line for name in (*each.opts, option_name(each))}
    for option in with_rules:
        for rule in option.rules:
            names = known if rule.needed else given
            others = [names[flag] for flag in rule.flags if flag in names]
            if others and not (rule.needed and given.keys() & rule.flags):
                of_line = others[:1] if rule.needed else others
                words = {**ctx.params, "option": option_name(option), "others": ", ".join(of_line)}
                messages.append(rule.message.format(**words))
                hints[rule.hint.format(**words)] = None
    if messages:
        raise ConfigError("\n".join(messages), "; ".join(hints))


def _refuse_ntasks(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise ConfigError(
            "-n, --ntasks is sbatch's number of tasks; hpc-gpt starts one task per GPU",
            f"use -G {value} for {value} GPUs",
        )


_COUNT, _SEQUENCE = CountType(), CountType(1024)
_FILE, _FOLDER = click.Path(path_type=Path, dir_okay=False), click.Path(path_type=Path, file_okay=False)
_PATH = click.Path(path_type=Path)
# Verbs that make, show or check a run; that plan one; all of these; that ask runs.
_RUN, _PLAN, _ALL, _ASK = "submit render doctor", "plan init", "submit render doctor plan init", "stop save requeue"
_NOT_DOCTOR = "submit render plan init"  # it checks one row of a sweep, and nothing that only the run itself is about

_OWN_EXPERIMENT = _excludes("EXPERIMENT --row --sweep --grid --smoke --max-parallel --skip-unfit",
                       "{option} continues a run's own experiment; {others} would make it another",
                       "leave {others} out, or submit a new run")  # fmt: skip
_EXCLUDED_BY_RACE = _excludes("--until --resume --branch --now --max-parallel --skip-unfit --sweep",
                         "{option} and {others} exclude each other", "leave {others} out")  # fmt: skip
_OF_RACE = _needs("--race", "{option} belongs to --race", "add --race, or leave {option} out")
_TWO_COMMANDS = "use two commands, one without {option}"
_NOT_TO_FIT = _excludes("--calibrate", "{option} does not go with --calibrate", _TWO_COMMANDS)


# In the order of each verb's help.
TABLE = (
    Option("--row", _RUN, "A row of EXPERIMENT; the first that can run unless --row or --sweep is given.",
           group=EXPERIMENT, metavar="NAME"),
    Option("--row", "plan", "A row of EXPERIMENT; the first that can run unless given.", group=EXPERIMENT,
           metavar="NAME"),
    Option("--sweep", "submit render", "Every row of EXPERIMENT that can run, each as a job.", group=EXPERIMENT,
           rules=[_needs("-o", "--sweep makes one script per row and needs a folder for them", "add -o FOLDER")]),
    Option("--force", "submit",
           "Accept a run predicted not to fit in memory; with --resume, declare gone a job that cannot be asked.",
           group=EXPERIMENT, before_script=True),
    Option("--force", "render", "Accept a run that is predicted not to fit in memory.", group=EXPERIMENT,
           before_script=True),
    Option("--smoke", "submit render",
           "A tiny model on at most 8 ranks, 5 steps or --set train.steps; here without --cluster.", group=EXPERIMENT),
    Option("--cluster", _ALL, "Cluster profile, by name or file.", group=EXPERIMENT, before_script=True,
           metavar="PROFILE", envvar="HPC_GPT_CLUSTER", shell_complete=completers.profiles_and_files),
    Option("--template", _RUN, "A template of your own that extends base.sh.j2.", group=EXPERIMENT, type=_PATH),
    Option("--checkpoints", "submit render",
           "Checkpoint files of your own program; a new one counts as progress of the job chain.",
           key="command.checkpoints", before_script=True, type=str, metavar="PATTERN"),
    Option("--set", _ALL, "Any value of the experiment (hpc-gpt help keys). May be repeated.", name="settings",
           group=EXPERIMENT, before_script=True, multiple=True, metavar="KEY=VALUE"),
    Option("--ntasks -n", _RUN, "", type=str, hidden=True, callback=_refuse_ntasks, expose_value=False),
    Option("--allow-tp-across-nodes", _ALL, "Let tensor parallelism span nodes.", key="layout.allow_tp_across_nodes",
           is_flag=True, default=None),
    Option("--exclusive", _RUN, "Take whole nodes.", key="job.exclusive", is_flag=True, default=None),

    Option("--model", _ALL, "Model preset: gpt2, 48b, llama3.1-8b, …; or transformers' config.json or its folder.",
           key="model.preset", type=str, shell_complete=completers.models),
    Option("--gpus -G", _ALL, "GPUs in total.", key="layout.gpus"),
    Option("--nodes -N", _ALL, "Nodes.", key="layout.nodes"),
    Option("--tensor-model-parallel-size --tp", _ALL, "Tensor parallel size.", key="layout.tp"),
    Option("--pipeline-model-parallel-size --pp", _ALL, "Pipeline stages.", key="layout.pp"),
    Option("--context-parallel-size --cp", _ALL, "Context parallel size: GPUs that share a sample.", key="layout.cp"),
    Option("--expert-model-parallel-size --ep", _ALL, "Expert parallel size: ranks of cp x dp that divide the experts.",
           key="layout.ep"),
    Option("--data-parallel-size --dp", _ALL, "Data parallel size; follows from the others unless given.",
           key="layout.dp"),
    Option("--micro-batch-size --mbs", _NOT_DOCTOR, "Samples in one pass of one replica.", key="layout.micro_batch"),
    Option("--global-batch-size --gbs", _NOT_DOCTOR, "Samples in one step.", key="layout.global_batch"),
    Option("--gas", _NOT_DOCTOR, "Micro-batches of a step (gradient accumulation steps).", key="layout.micro_batches"),
    Option("--engine", _ALL, "Engine: deepspeed-3d, deepspeed-zero, fsdp, ddp, … (hpc-gpt help engines).",
           key="engine.name", type=str),
    Option("--zero-stage", _NOT_DOCTOR, "ZeRO stage.", key="engine.zero_stage", type=int),
    Option("--seq-length --seq", _ALL, "Tokens in a sample; 8k is 8192.", key="model.seq", type=_SEQUENCE),
    Option("--hidden", _PLAN, "Hidden size.", key="model.hidden"),
    Option("--layers", _PLAN, "Layers.", key="model.layers"),
    Option("--heads", _PLAN, "Attention heads.", key="model.heads"),
    Option("--vocab", _PLAN, "Vocabulary, before padding.", key="model.vocab"),
    Option("--recompute", _PLAN, "Recomputation: none, selective, full, 1/4, or modules.",
           key="engine.recompute", type=str),
    Option("--offload", _PLAN, "Offload to the host: none, optimizer or full.", key="engine.offload", type=str),
    Option("--account -A", _RUN, "Account to charge.", key="job.account", type=str),
    Option("--partition -p", _RUN, "Partition.", key="job.partition", type=str),
    Option("--qos -q", _RUN, "Quality of service.", key="job.qos", type=str),
    Option("--constraint -C", _RUN, "Required node features.", key="job.constraint", type=str),
    Option("--time -t", _RUN, "Time limit, as for sbatch.", key="job.time", type=str),
    Option("--cpus-per-task -c", _RUN, "CPUs for each rank.", key="job.cpus_per_task"),
    Option("--exclude -x", _RUN, "Nodes to exclude.", key="job.exclude", type=str),
    Option("--nodelist -w", _RUN, "Nodes to use.", key="job.nodelist", type=str),
    Option("--dependency -d", _RUN, "Jobs to wait for, as for sbatch.",
           key="job.dependency", type=str),
    Option("--job-name -J", _RUN, "Name of the job.", key="job.name", type=str),
    Option("--reservation", _RUN, "Reservation.", key="job.reservation", type=str),
    Option("--mem", _RUN, "Memory of a node, as for sbatch.", key="job.mem", type=str),
    Option("--comment", _RUN, "A comment for Slurm to keep.", key="job.comment", type=str),
    Option("--max-gpu-hours", "submit render", "Budget of the run: its job chain ends before it uses more.",
           key="job.max_gpu_hours", group=LENGTH, before_script=True, type=float),

    Option("--dry-run", "submit",
           "Print the request and the prediction, ask sbatch --test-only, write nothing. Refuses what submit "
           "itself refuses; sbatch may refuse more, such as a job above a limit.", group=OUTPUT, before_script=True),
    Option("--script", "submit", "With --dry-run: print the job script.", group=OUTPUT, before_script=True,
           rules=[_excludes("--json", "--script prints the script, and --json one object", "give one of the two"),
                  _needs("--dry-run", "--script prints the script of a --dry-run",
                         "add --dry-run, or use hpc-gpt render")]),
    Option("--yes -y", "submit", "Queue the default experiment without asking.", group=OUTPUT, before_script=True,
           envvar="HPC_GPT_YES"),
    Option("--wait", "submit", "Follow the job to its end; exit 3 if it fails. Ctrl-C stops the job.", group=OUTPUT,
           before_script=True, sbatch="-W"),
    Option("--now", "submit", "On this machine without Slurm: do not wait for GPUs that other runs use.",
           rules=[_excludes("--sweep --grid", "--now starts one run, and {others} gives many",
                            "--row NAME names one of them")]),
    Option("--grid", "submit",
           "One run per value; with several --grid one per combination. In a file with [rows] it varies the row of "
           "--row.", group=EXPERIMENT, multiple=True, metavar="KEY=VALUE,VALUE",
           rules=[_excludes("--sweep", "--sweep has rows of its own or none, and --grid makes rows",
                            "give one of the two")]),
    Option("--max-rows", "submit", "With --grid: maximum number of rows.", group=EXPERIMENT, type=CountType(least=1),
           default=100, show_default=True, metavar="N"),
    Option("--max-parallel", "submit",
           "With --sweep or --grid: of the rows with equal requests, run at most N at a time.", group=EXPERIMENT,
           type=CountType(least=1), metavar="N", rules=[_needs("--sweep --grid")]),
    Option("--skip-unfit", "submit", "With --sweep or --grid: leave out rows that are refused, and print them.",
           group=EXPERIMENT, rules=[_needs("--sweep --grid")]),
    Option("--race", "submit", "Measure EXPERIMENT's rows, or the planner's best layouts, in turns in one job.",
           rules=[_EXCLUDED_BY_RACE]),
    Option("--rounds", "submit", "With --race: number of rounds, with one visit per row; 3 unless given.", type=_COUNT,
           metavar="N", rules=[_OF_RACE]),
    Option("--steps", "submit", "With --race: steps per visit, after its warm-up; 20 unless given.", group=LENGTH,
           type=_COUNT, metavar="N",
           rules=[_OF_RACE._replace(hint="to train so many steps: --until steps={steps}; " + _OF_RACE.hint)]),
    Option("--top", "submit", "With --race, without [rows]: number of the planner's layouts; 5 unless given.",
           type=_COUNT, metavar="N", rules=[_OF_RACE]),
    Option("--json", "submit", "One JSON object on stdout: the submitted runs; all else on stderr.",
           group=OUTPUT, before_script=True),
    Option("--until", "submit", "Train until tokens=30e9, steps=N or loss=X. Prints a forecast: jobs, GPU-hours, date.",
           group=LENGTH, multiple=True, metavar="WHAT"),
    Option("--resume", "submit", "Resume from RUN's checkpoint: the same run, or with other options a new run.",
           group=LENGTH, metavar="RUN", shell_complete=completers.runs,
           rules=[_OWN_EXPERIMENT,
                  _excludes("--branch", "--resume continues a run, and --branch begins another one from its checkpoint",
                            "give one of the two")]),
    Option("--branch", "submit",
           "A new run from RUN's checkpoint of that step, or its newest; it may have another learning rate, "
           "schedule, weight decay and [data]. RUN may be training.", metavar="RUN[@STEP]",
           shell_complete=completers.runs, rules=[_OWN_EXPERIMENT]),
    Option("--from-start", "submit", "With --resume: train RUN's experiment again from step 0, as a new run.",
           group=LENGTH,
           rules=[_needs("--resume", "--from-start needs --resume RUN",
                         "without --resume every run begins at step 0")]),
    Option("-o", "render", "With --sweep: write the scripts there, one NAME.sh per row; none is overwritten.",
           name="folder", type=_FOLDER, metavar="FOLDER",
           rules=[_needs("--sweep", "-o is the folder for the scripts of a sweep; one script goes to stdout",
                         "use > job.sh")]),
    Option("-o", "init", "Write the files there, not here.", name="folder", type=_FOLDER, default=Path(),
           metavar="FOLDER"),
    Option("--probe", "doctor",
           "Also start the ranks of a local profile for a few seconds and measure them; always done if there is a GPU.",
           before_script=True),
    Option("--forgive", "doctor", "Take NODE off the cluster's list of bad nodes, and do nothing else.",
           metavar="NODE"),
    Option("--json", "doctor", "One JSON object on stdout.", group=OUTPUT, before_script=True),

    Option("--why", "plan", "Explain one layout, such as tp4-pp16-dp1, with its arithmetic line by line.",
           metavar="LAYOUT", rules=[_NOT_TO_FIT, _excludes("--max-model --max-seq", hint=_TWO_COMMANDS)]),
    Option("--max-model", "plan", "Find the largest model of a family that fits; ignores --model.",
           rules=[_NOT_TO_FIT, _excludes("--max-seq", hint=_TWO_COMMANDS)]),
    Option("--max-seq", "plan", "Find the longest sequence of the model that fits; ignores --seq.",
           rules=[_NOT_TO_FIT]),
    Option("--tokens", "plan", "Tokens to train on, such as 15T, for days and GPU-hours; 300B unless given.",
           group=LENGTH, type=_COUNT, metavar="N"),
    Option("--json", "plan", 'One JSON object: {"schema": 1, "candidates": [...], ...}.', group=OUTPUT),
    Option("--device", "plan", "Plan for usual nodes of a GPU, such as h200, without a profile; instead of --cluster.",
           metavar="GPU",
           rules=[_NOT_TO_FIT,
                  _excludes("--cluster", "--device {device} plans without a profile, and --cluster {cluster} names one",
                            "give one of the two")]),
    Option("--calibrate", "plan",
           "Fit the planner's constants to records of runs, such as logs/, and store them in the profile of "
           "--cluster. May be repeated.", type=_PATH, multiple=True, metavar="RECORDS"),
    Option("--calibration", "plan", "Use the constants of cluster NAME.", metavar="NAME",
           shell_complete=completers.profiles, rules=[_NOT_TO_FIT]),

    Option("--json", "status", "One JSON object: schema, runs."),
    Option("--watch", "status", "Refresh until Ctrl-C, or until every run has ended."),
    Option("--interval", "status", "Seconds, for --watch.", type=click.FloatRange(min=0.1), default=10.0,
           show_default=True),
    Option("--interval", "top", "Seconds between two looks.", type=click.FloatRange(min=0.5), default=5.0,
           show_default=True),
    Option("--open", "status", "One line per run of a sweep, as if the sweep was named.", name="opened"),
    Option("--sizes", "status", "Disk space of each run, by kind, and free space."),
    Option("--state", "status", "Only runs of that state (hpc-gpt help causes); may be repeated.", name="states",
           multiple=True, metavar="STATE", rules=[_excludes("--sizes --watch")]),
    Option("--failed", "status", "Only runs that failed, or whose end is not known.",
           rules=[_excludes("--sizes --watch")]),
    Option("--all", "status", "Every run; the newest 20 unless given.", name="show_all"),
    Option("--follow -f", "logs", "Print what the run writes, over all its attempts, until it has ended."),
    Option("--attempt", "logs", "The log of this attempt; the last unless given.", type=click.IntRange(min=1)),
    Option("--tail -n", "logs", "Only the last lines.", type=click.IntRange(min=0), metavar="LINES"),
    Option("--rank", "logs", "Only lines of this rank.", type=click.IntRange(min=0), metavar="N",
           rules=[_excludes("--follow")]),
    Option("--path", "logs", "Print the log's path instead."),
    Option("--wait", _ASK, "Wait until it has been done; Ctrl-C ends only the wait."),
    Option("--yes -y", f"{_ASK} cancel", "Do not ask."),
    Option("--json", f"{_ASK} cancel", "One JSON object: schema, verb, runs."),
    Option("--keep", "clean", "How many of the newest checkpoints stay.", default="last", show_default=True,
           metavar="last|none|N"),
    Option("--older", "clean", "Only runs that ended at least this long ago: 30d, 12h, 2w.", metavar="TIME"),
    Option("--yes -y", "clean", "Remove the files; without it they are only listed."),
    Option("--json", "clean", "One JSON object: schema, removed, bytes, free_bytes, runs."),

    Option("--format", "report", "How the records are written.", name="form",
           type=click.Choice(["table", "csv", "md", "json", "jsonl"]), default="table", show_default=True),
    Option("--json", "report", 'Short for --format json: {"schema": 1, "records": [...]}.'),
    Option("--columns", "report",
           "The name of a published table, such as gpt2-meg; usual; all; keys of a record or an experiment, such as "
           "gpus,step_s,lr; auto: those of a published table if all runs belong to its sweep, else usual. On a "
           "terminal, usual and auto show the columns that fit.", default="auto", show_default=True,
           metavar="SET|KEY,..."),
    Option("--sort", "report", "Sort by keys of a record; -KEY from high to low. Oldest first unless given.",
           default="", metavar="KEY,..."),
    Option("--html", "report", "Also write a page with charts.", type=_FILE),
    Option("--predictions", "report",
           "Print the planner's predictions for each run beside the measured figures, and the mean error.",
           rules=[_excludes("--columns", "--predictions has its own columns", "leave --columns out")]),
    Option("--tensorboard", "report", "Also write the curves as TensorBoard event files.", type=_FOLDER, metavar="DIR"),
    Option("--wandb", "report", "Also write offline W&B runs.", type=_FOLDER, metavar="DIR"),
    Option("--json", "compare", 'One JSON object: {"schema": 1, "comparisons": [...]}.'),
    Option("--json", "why", "One JSON object: schema, run, ended, cause, lines, attempts, …"),
    Option("--output -o", "data", "The token file; NAME.tokens in this folder unless given.", type=_PATH),
    Option("--tokenizer", "data", "byte, char, a tokenizer.json, or tiktoken:NAME.", default="byte", show_default=True,
           shell_complete=completers.files),
    Option("--format", "data", "megatron: a pair of files, OUTPUT.bin and OUTPUT.idx.", name="form",
           type=click.Choice(["tokens", "megatron"]), default="tokens", show_default=True),
    Option("--text-key", "data", "Where jsonl and Parquet have a document's text.", default="text", show_default=True),
    Option("--begin-token", "data", "Write the tokenizer's begin-of-text token before each document."),
    Option("--bytes", "data", "Add what bits per byte need to this token file or Megatron's prefix; SOURCE is its "
           "tokenizer.", name="bytes_of", type=_PATH, metavar="FILE"),
    Option("--format", "export", "Format of the files.", name="form", type=click.Choice(["hf"]), default="hf",
           show_default=True),
    Option("--out -o", "export", "The new folder; RUN-hf in this folder unless given.", type=_PATH),
    Option("--dtype", "export", "Data type of the weights.", type=click.Choice(["fp32", "bf16"]), default="fp32",
           show_default=True),
    Option("--step", "export", "The checkpoint of this step; the newest unless given.", type=int),
    Option("--name", "detect", "Write it to clusters/NAME.toml in the config folder.", metavar="NAME",
           rules=[_excludes("--output", hint="give one of the two")]),
    Option("--output -o", "detect", "Write it to FILE.", type=_PATH, metavar="FILE"),
    Option("--partition -p", "detect", "Partition of the profile; one with GPUs unless given.", metavar="PARTITION"),
)  # fmt: skip
