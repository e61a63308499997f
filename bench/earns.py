"""What each part of the reader earns: `python -m bench.earns [--page]`. Nothing passes or fails.

    python -m bench.earns LOGS TRUTHS

Switches one part off at a time, reads logs whose truth is known, and counts the figures that are right and wrong. A
part that earns no right figure and prevents no wrong one goes, unless BY_DECISION says why it stays.

A part is found, not listed: a program of the dialects; a family of failures, by class and advice; a row of the table of
inferences; a function of `runs` that sets, drops or flags a field, which then does all but that. The logs are those
of tests/reader/truth, the specimens (a dialect's own does not count for it), the failures of tests/reader/printed, the
runs of tests/specimens and, if they are there, the logs, the cases and the lines of log-formats.md in ../shared. A
case's EXPECTED names class and node. What else is read from a case or such a line with every part counts as true: it
shows that somebody's lines need the part.

LOGS has NAME.log for each NAME.json of TRUTHS, in the format of tests/reader/truth; only these are read then. `--page`
writes the table into docs/extending.md; tests/reader/test_earns.py holds its names to the tree.
"""

import argparse
import ast
import importlib
import inspect
import json
import multiprocessing
import pickle
import pkgutil
import re
import sys
import tarfile
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.reader import runs
from hpc_gpt.reader.lines import line_kinds, matches
from hpc_gpt.reader.lines.read_log import LogRead, read_log
from hpc_gpt.reader.runs import foreign, rules
from hpc_gpt.report.gather import gather_paths
from tests.conftest import REPOSITORY
from tests.reader.programs.test_specimens import SAID, said
from tests.reader.reading import specimen_of
from tests.reader.test_printed import FILES, causes, logs_of
from tests.reader.test_truth import _ROUNDED, TRUTH, is_right
from tests.specimens.__main__ import ARCHIVE

SHARED = REPOSITORY.parent / "shared"
PAGE = REPOSITORY / "docs/extending.md"
MARKS = ("<!-- the table of bench/earns.py -->\n", "<!-- its end -->\n")
# {kind of part: its heading in the table}
KINDS = {
    "program": "Programs",
    "failure": "Failures, by class and advice",
    "rule": "Rules",
    "record": "Functions of a record",
}
FIGURES = (
    *(
        "name",
        "engine",
        "gpus",
        "nodes",
        "tp",
        "pp",
        "cp",
        "dp",
        "zero_stage",
        "micro_batch",
        "micro_batches",
        "global_batch",
    ),
    *("seq", "hidden", "layers", "heads", "vocab", "params", "params_active", "recompute", "dtype", "step_s"),
    *("tokens_per_s", "tokens_per_s_gpu", "tokens_total", "tflops_hardware", "tflops_model", "tflops_printed"),
    *(
        "mfu",
        "hfu",
        "mfu_printed",
        "loss_first",
        "loss_last",
        "loss_eval",
        "skipped_steps",
        "nan_steps",
        "save_s",
        "last_step",
    ),
    *("memory_allocated_gib", "memory_reserved_gib", "ended", "cause", "advice", "node", "failed_node"),
)
_LONGEST_S = 60
NOT_READ: tuple[Any, ...] = (None, [], "unknown")
# What ../shared/logs say, by hand (tests/reader/runs/test_shared_logs.py has the reasons).
LOGS = {
    "meg_gpt2_perf_n16": {
        "gpus": 64, "tp": 4, "pp": 16, "dp": 1, "micro_batch": 4, "micro_batches": 256, "global_batch": 1024,
        "seq": 1024, "step_s": 128.95, "params": 51_970_064_384, "layers": 64, "hidden": 8192, "heads": 32,
        "vocab": 50688, "engine": "megatron-lm", "dtype": "fp16", "recompute": "full", "skipped_steps": 3,
    },
    "meg_ds_zero_gpt2_perf_n16_nbs48_ms48": {
        "gpus": 64, "tp": 4, "pp": 1, "dp": 16, "micro_batch": 48, "micro_batches": 1, "global_batch": 768,
        "step_s": 124.91, "params": 51_970_064_384, "engine": "deepspeed-zero", "zero_stage": 3,
        "tflops_printed": 40.93, "memory_allocated_gib": 25.506, "memory_reserved_gib": 27.572, "loss_first": 12.52221,
        "loss_last": 40.75231,
    },
    "hf_ds_gpt2_base_n4-1832555": {
        "gpus": 16, "nodes": 4, "tp": 1, "pp": 1, "dp": 16, "micro_batch": 4, "micro_batches": 1, "global_batch": 64,
        "step_s": 57.44, "layers": 40, "hidden": 7168, "heads": 32, "seq": 1024, "vocab": 50257, "zero_stage": 3,
        "params": 25_033_831_424, "engine": "hf-deepspeed", "dtype": "fp16", "job_id": "1832555", "ended": "done",
    },
}  # fmt: skip
# {begin of parts' names: why they stay although no log here shows what they earn}
_OF_PUBLIC = "of 401 public logs that are not here"
BY_DECISION = {
    "failure amd_faults": "AMD's faults: there are no logs of them yet",
    "failure fabric_faults": "faults of fabrics: there are no logs of them yet",
    "failure slurm_words": "Slurm's own words, as its sources have them",
    "failure collectives collective_timeout: see": "others never came: no node is to blame",
    "failure error: Slurm's": "Slurm's own words, as its sources have them",
    "failure error: the server": "a server's fault passes: without its row the same words are a node without internet",
    "failure node_failure: Ray": "the issue on causes names it",
    "failure user_error: correct setup": "our own job script prints it",
    **dict.fromkeys(
        (
            f"failure user_error: {cure}"
            for cure in ("correct the option", "install the version", "let the job", "name a file", "name a folder",
                         "the nodes' processors", "resume on")
        ),
        "the issue on causes names it: it is not started again",
    ),
    **dict.fromkeys(
        ("failure user_error: raise the limit of locked", "failure error, of another: InfiniBand"),
        "faults of fabrics: there are no logs of them yet",
    ),
    **dict.fromkeys(
        (
            f"failure user_error: {cure}"
            for cure in ("give MASTER_ADDR", "start data workers", "start fewer", "the checkpoint belongs",
                         "these GPUs", "torch 2.6")
        ),
        "a library's fixed text, in many public threads: without its row it is started again in vain",
    ),
    **dict.fromkeys(
        ("failure error, of another", "failure user_error, of another", "failure gpu_faults error, of another",
         "failure python_exceptions user_error, of another", "failure training_stopped walltime, of another"),
        "an echo: without its row a consequence is the cause",
    ),
    "program collectives": "the sequence number that `never came` needs",
    "program memory_exhausted": "the host's memory that tells whose kill a signal 9 is",
    "program deepspeed_chat": "an issue names it: it went and came back",
    "program deepspeed_config": "lines of the published logs in ../shared, whose figures others state, too",
    "program deepspeed_overflow": "the issue on causes names it: a skipped step is not NaN",
    "program fairseq_epochs": "the issue on several trainings in a file names it: bits beside nats",
    "program internevo": f"figures of some {_OF_PUBLIC}",
    "program megatron_alcf": "an issue names it: it went and came back",
    "program megatron_bridge": f"the only TFLOP/s of its logs; lines of some {_OF_PUBLIC}",
    "program mmengine": "the issue on figures names mmcls-like logs",
    "program hpc_gpt_metrics": "our own metrics.jsonl without its run folder",
    "rule ": "one of the products that hold in any training, and the axes that a layout leaves out: a row each",
    "record figures": "shares of a device's peak",
    "record epochs": f"lines of epochs: without it one wrong figure {_OF_PUBLIC}",
    "record facts._add_usual_batch": "a batch that falls: no log here has one",
    "record facts._compare": "the flag on a fact that is stated twice",
    "record log_steps": f"samples and times of MLPerf's and others' lines: 16 figures {_OF_PUBLIC}",
    "record own_run": "our runs on GPUs: the archives here are of a CPU",
    "record params._compare": f"the flag on a count that the shape contradicts: else 4 wrong sizes {_OF_PUBLIC}",
    "record params": "vocabulary, layers and counts of a shape that few logs state",
    "record program_run": "a script's run, whose lines the watch of our job reads",
    "record results": "mixtures of experts, and the memory of a pipeline's stages",
    "record rules": f"contradictions: without them 3 wrong rates {_OF_PUBLIC}",
    "record times": "a rate that grows with the step, a batch that grows, the flag on epochs",
}  # fmt: skip


@dataclass
class Case:
    """Something to read and what is true of it. `own`: the dialect whose specimen it is. `of_record`: what is counted
    is of a record."""

    count: Callable[[], Counter[str]]
    lines: bytes = b""
    own: str = ""
    of_record: bool = False

    def called(self) -> tuple[Counter[str], set[CodeType]]:
        """(the counts, the code of every function that was called for them)"""
        codes: set[CodeType] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            codes.add(frame.f_code)

        sys.setprofile(note)
        try:
            return self.count(), codes
        finally:
            sys.setprofile(None)

    def patterns(self) -> set[int]:
        """The numbers of the patterns whose literals are in the lines."""
        zeroed = matches.ANSI.sub(b"", self.lines).translate(matches.ZEROS)
        lines = list(dict.fromkeys(re.split(rb"[\r\n]", zeroed)))
        return {each.number for found in matches.literal_scan().candidates(lines).values() for each in found}


@dataclass
class Part:
    """What can be switched off. `patterns`: their numbers, for a program or a family; `called`: of a function. Only the
    cases with one of them are read again. `dialect`: whose specimen does not count for it."""

    kind: str
    name: str
    size: str
    switch_off: Callable[[], None]
    patterns: set[int] = field(default_factory=set)
    called: CodeType | None = None
    dialect: str = ""

    @property
    def decision(self) -> str:
        """The begin of its name in BY_DECISION, empty without one."""
        return next((begin for begin in BY_DECISION if f"{self.kind} {self.name}".startswith(begin)), "")


# --- the parts


def parts() -> list[Part]:
    """Every part of the reader, in the order of the table."""
    every = [*_of_patterns(), *_of_rules(), *_of_records()]
    twice = [name for name, count in Counter((each.kind, each.name) for each in every).items() if count > 1]
    assert not twice, f"two parts have one name: {twice}"
    return every


def _of_patterns() -> Iterator[Part]:
    """The programs, then the families of failures: patterns of one class and one advice."""
    groups: dict[tuple[str, str, str], list[matches.DialectPattern]] = {}
    for each in matches.all_patterns():
        pattern, of = each.pattern, each.dialect.name
        if pattern.kind != "failure":
            kind, name = "program", of
        else:
            kind, advice = "failure", " ".join(re.sub(r"[`|*<>]", "", pattern.to_do).split()[:5])
            name = (
                f"{of} {pattern.ended}".removeprefix("failure_families ")
                + ", of another" * pattern.echo
                + f": {advice}" * bool(advice)
            )
        groups.setdefault((kind, of, name), []).append(each)
    for (kind, of, name), of_part in sorted(groups.items(), key=lambda group: (group[0][0] == "failure", *group[0])):
        numbers = {each.number for each in of_part}
        size = f"{len(numbers)} pattern{'s' * (len(numbers) > 1)}"
        yield Part(kind, name, size, lambda numbers=numbers: _without(numbers), numbers, dialect=of)  # type: ignore[misc]


def _without(numbers: set[int]) -> None:
    """Every later line is read without these patterns."""
    others = tuple(each for each in matches.all_patterns() if each.number not in numbers)
    matches.all_patterns = lambda: others  # type: ignore[assignment]
    matches.patterns_by_literal.cache_clear()
    matches.literal_scan.cache_clear()
    matches._failures_found.clear()
    line_kinds._shared = line_kinds.LineKinds()


def _of_rules() -> Iterator[Part]:
    for row in rules.RULES:
        name = f"{row.whole} = {' x '.join(row.factors) or 1}" + f", {row.says}" * bool(row.says)
        others = tuple(each for each in rules.RULES if each is not row)
        yield Part("rule", name, "1 row", lambda others=others: _with_rules(others))  # type: ignore[misc]


def _with_rules(rows: tuple[rules.Rule, ...]) -> None:
    """Every later record follows these rules alone."""
    rules.RULES = rows  # type: ignore[misc]
    rules._rows.cache_clear()


# Names that stand for what is built, in `runs`: a call of one of its methods or a statement on its tables sets,
# drops or flags a field.
BUILT = {"draft": ("set", "infer", "flag"), "record": (), "figures": (), "flags": ("append",)}


def _of_records() -> Iterator[Part]:
    for module in _modules(runs):
        if module.__name__.rpartition(".")[2] in ("grouping", "discovery", "attempts"):
            continue  # which logs and attempts are one run: their answer is no field
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and (off := _without_effect(function)) is not None:
                stem = module.__name__.rpartition(".")[2]
                size = f"{len(inspect.getsource(function).splitlines())} lines"
                yield Part(
                    "record",
                    f"{stem}.{name}",
                    size,
                    lambda each=function, off=off: _replace(each, off),  # type: ignore[misc]
                    called=function.__code__,
                )


def _without_effect(function: Callable[..., Any]) -> ast.Module | None:
    """The function without the statements that set, drop or flag a field; one that makes or finds something in parts
    and steps and returns None, or something or None, does nothing and returns None. None for other functions."""
    tree, harmless = ast.parse(textwrap.dedent(inspect.getsource(function))), _Harmless()
    (made,) = tree.body
    assert isinstance(made, ast.FunctionDef)
    about = " ".join(ast.unparse(each.annotation) for each in made.args.args if each.annotation)
    returns = ast.unparse(made.returns) if made.returns else ""
    harmless.visit(tree)
    if (
        not harmless.removed
        and re.search(r"\b(Part|LogSteps|StepTable|StepColumn|Draft)\b", about)
        and returns.endswith("None")
    ):
        made.body = [ast.Return(None)]
    elif not harmless.removed:
        return None
    return ast.fix_missing_locations(tree)


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for each in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{each.name}")


class _Harmless(ast.NodeTransformer):
    """Takes out of a function what sets, drops or flags a field. `removed`: how much that was."""

    def __init__(self) -> None:
        self.removed = 0

    def _take(self, instead: ast.AST) -> ast.AST:
        self.removed += 1
        return instead

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self._take(ast.Pass()) if _changes(node.value) else self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return self._take(ast.Return(None)) if _changes(node.value) else self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> ast.AST:
        return self._take(ast.Pass()) if any(_root(each) in BUILT for each in node.targets) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        sets = any(isinstance(each, ast.Subscript) and _root(each) in BUILT for each in node.targets)
        return self._take(ast.Pass()) if sets else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return self._take(ast.Pass()) if _root(node.target) in BUILT else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "replace" and _root(node.args[0]) in BUILT:
            return self._take(node.args[0])
        return self.generic_visit(node)


def _changes(node: ast.AST | None) -> bool:
    """Whether it is `draft.set(…)` and the like, or `draft.values.pop(…)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    of = node.func.value
    direct = isinstance(of, ast.Name) and node.func.attr in BUILT.get(of.id, ())
    return direct or (node.func.attr == "pop" and isinstance(of, ast.Attribute) and _root(of) in BUILT)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _replace(function: Callable[..., Any], off: ast.Module) -> None:
    """Puts the function without its effect in its place, wherever it is imported."""
    made: dict[str, Any] = {}
    exec(compile(off, function.__code__.co_filename, "exec"), function.__globals__, made)
    for module in [each for name, each in sys.modules.items() if name.startswith("hpc_gpt.")]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, made[function.__name__])


# --- what is read


@cache
def _pickled(path: Path) -> bytes:
    return pickle.dumps(read_log(path))


def _cached_log(path: Path) -> LogRead:
    log: LogRead = pickle.loads(_pickled(path))
    return log


def of_log(path: Path, true: dict[str, Any], as_read: bool = False) -> Case:
    """The case of a log, or of a run folder, and {field: what is true}; `as_read`: and what else is read now."""
    within, absent = true.pop("within", {}), true.pop("absent", ())
    whole = _read(path) if as_read or "ended" in true else {}
    if whole.get("ended") in true.get("ended", ()):
        true |= {name: whole[name] for name in ("cause", "advice") if whole[name]}
    if as_read:
        read = {name: value for name, value in whole.items() if name in FIGURES or name.startswith("flag ")}
        true = {name: value for name, value in read.items() if value is not None} | true
        absent = [name for name in FIGURES if whole.get(name) is None]

    def count() -> Counter[str]:
        found, read = Counter[str](), _read(path)
        for name, value in true.items():
            exact = 0.0 if isinstance(value, int) else 0.011
            share = within.get(name, _ROUNDED.get(name, exact))
            figure = read.get(name)
            if figure == value or (isinstance(value, list) and figure in value):
                found["right"] += 1
            elif figure in NOT_READ:
                found["null"] += 1
            else:
                found["right" if not isinstance(value, list) and is_right(figure, value, share) else "wrong"] += 1
        found.update("right" if read.get(name) in (None, []) else "wrong" for name in absent)
        return found

    lines = path.read_bytes() if path.is_file() else b""
    return Case(count, lines, of_record=True)


def _read(path: Path) -> dict[str, Any]:
    """The fields of the last run of a log, with its first cause in words and the advice on it."""
    runs = gather_paths([str(path)], Path("/nowhere")).runs
    if not runs:
        return {}
    record, cause = runs[-1].record, runs[-1].causes[-1] if runs[-1].causes else None
    fields = {
        name: None if value is None else getattr(record, name) for name, value in record.to_tables().items()
    }  # null for NaN
    fields |= {f"flag {flag}": flag for flag in record.flags}
    return {**fields, "advice": cause and cause.failure and cause.failure.to_do, "node": cause and cause.node}


def of_specimen(name: str, figures: str) -> Case:
    true = dict(line.split(" = ", 1) for line in figures.splitlines())
    true = {key: text for key, text in true.items() if key.split()[0] not in ("engine", "dtype", "flag", "alone")}

    def count() -> Counter[str]:
        read = dict(line.split(" = ", 1) for line in said(specimen_of(name).splitlines()).splitlines())
        kinds = ("null" if key not in read else "right" if read[key] == text else "wrong" for key, text in true.items())
        return Counter(kinds)

    return Case(count, specimen_of(name).encode(), name)


def of_printed(block: str) -> Case:
    """A block of causes.txt or threads.txt: the class with its rank and node, the words of the cause, the advice."""
    given = [line for line in block.split("\n") if line.startswith(("#", ">"))]
    first, *more = [line for line in block.split("\n") if not line.startswith(("#", ">"))]

    def count() -> Counter[str]:
        read = causes(given)
        found = Counter["str"](
            {"null" if read[0].startswith("unknown") else "right" if read[0] == first else "wrong": 1}
        )
        found.update("right" if line in read else "null" for line in more if line.startswith(("to do", "left out")))
        return found

    return Case(count, "\n".join(line for lines in logs_of(given).values() for line in lines).encode())


def truths_of(logs: Path, truths: Path) -> Iterator[Case]:
    for path in sorted(truths.glob("*.json")):
        true = json.loads(path.read_text())
        fields = {**true["record"], "within": true.get("within", {}), "absent": true.get("absent", [])}
        yield of_log(logs / f"{path.stem}.log", fields)


def cases_of_the_tree(folder: Path) -> Iterator[Case]:
    """`folder`: an empty one, for the runs of earlier versions."""
    yield from truths_of(TRUTH[0].parent, TRUTH[0].parent)
    for name, figures in re.findall(r"^(\w+)\n((?:  .*\n)*)", SAID.read_text(encoding="utf-8"), re.MULTILINE):
        yield of_specimen(name, figures)
    for file in FILES:
        for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
            if file.stem in ("causes", "threads") and not re.search(r"^>- ", block, re.MULTILINE):
                yield of_printed(block)
    for archive in sorted(ARCHIVE.parent.glob("made_at_*.tar.xz")):
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    for path in folder.rglob("record.json"):
        if not _read(path.parent):
            continue  # of a version that this one refuses
        record = json.loads(path.read_text())
        del record["config_hash"]  # each version has its own
        true = {key: value for key, value in record.items() if isinstance(value, int | float | str)}
        yield of_log(path.parent, true)
    if not SHARED.is_dir():
        return
    for log in sorted((SHARED / "logs").iterdir()):
        yield of_log(log, LOGS[log.stem])
    for case in sorted((SHARED / "cases").iterdir()):
        yield from of_case(case)
    for block in re.findall(r"^```\n(.*?)^```", (SHARED / "log-formats.md").read_text(), re.DOTALL | re.MULTILINE):
        yield of_lines(block.splitlines())


def of_case(case: Path) -> Iterator[Case]:
    """A failing log of ../shared/cases, whose EXPECTED names a class, and a node perhaps."""
    files = [path for path in case.iterdir() if path.is_file()] if case.is_dir() else []
    logs = [path for path in files if path.suffix in (".err", ".log", ".out", ".txt")]
    expected = (case / "EXPECTED").read_text() if case / "EXPECTED" in files else ""
    of_why = re.split(r"[;.]|, not", re.split(r"why[^:]{0,20}: ", expected)[-1])[0]
    classes = [word for word in re.findall(r"\w+", of_why) if word in ENDED]
    true: dict[str, Any] = {"ended": classes} if classes else {}
    if node := re.search(r"class [^;]*, node (\S+);", expected):
        true["node"] = node[1]
    for log in logs if case.name[0] in "ABLV" or case.name in ("extra", "figures") else ():
        yield of_log(log, dict(true) if len(logs) == 1 else {}, as_read=True)


def of_lines(lines: list[str]) -> Case:
    """Lines that a program printed, and what is read from them now."""
    true = said(lines).splitlines()

    def count() -> Counter[str]:
        read = said(lines).splitlines()
        return Counter("right" if line in read else "null" for line in true)

    return Case(count, "\n".join(lines).encode())


# --- what is counted


@dataclass
class Bench:
    """The cases, what each gives with every part, and what it gives without one."""

    cases: list[Case]

    def __post_init__(self) -> None:
        foreign.read_log = _cached_log  # type: ignore[attr-defined]
        self.patterns = [each.patterns() for each in self.cases]
        self.base, self.called = zip(*(each.called() for each in self.cases), strict=True)
        self.whole = sum(self.base, Counter[str]())

    def without(self, part: Part) -> tuple[int, int]:
        """(right figures that it earns, wrong ones that it prevents)."""
        part.switch_off()
        if part.patterns:
            _pickled.cache_clear()
        right = wrong = 0
        for case, patterns, called, base in zip(self.cases, self.patterns, self.called, self.base, strict=True):
            of_part = (
                patterns & part.patterns if part.patterns else part.called in called if part.called else case.of_record
            )
            if of_part and not (case.own and case.own == part.dialect):
                found = case.count()
                right, wrong = right + base["right"] - found["right"], wrong + found["wrong"] - base["wrong"]
        return right, wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="*", type=Path, metavar="LOGS TRUTHS")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(list(truths_of(*asked.folders) if asked.folders else cases_of_the_tree(Path(name))))
        whole = bench.whole
        print(", ".join(f"{whole[kind]} {kind}" for kind in ("right", "null", "wrong")), flush=True)
        rows = table(bench, parts())
    if asked.page:
        begin, end = MARKS
        before, after = PAGE.read_text(encoding="utf-8").split(begin)
        PAGE.write_text(before + begin + rows + end + after.split(end)[1], encoding="utf-8")


def table(bench: Bench, every: Sequence[Part]) -> str:
    """What each part earns, as on the page; each is printed when it is known."""
    of_kind: dict[str, list[str]] = {}
    for part in every:
        found = in_a_fork(lambda part=part: bench.without(part))  # type: ignore[misc]
        earns = "all" if found is None else f"{found[0]}" + f" ({found[1]})" * (found[1] != 0)
        print(f"{part.kind:8}{part.size:>13}{earns:>12}  {part.name}", flush=True)
        of_kind.setdefault(part.kind, []).append(f"`{part.name}` {earns}")
    texts = [f"**{KINDS[kind]}**: {', '.join(each)}." for kind, each in of_kind.items()]
    wrapped = ["\n".join(textwrap.wrap(each, 140, break_on_hyphens=False)) for each in texts]
    begins = {why: [begin.strip() for begin, of in BY_DECISION.items() if of == why] for why in BY_DECISION.values()}
    decisions = [f"| {', '.join(of)} … | {why} |" for why, of in begins.items()]
    return "\n\n".join([*wrapped, "\n".join(["| stays by decision | why |", "|---|---|", *decisions])]) + "\n"


def names_on_the_page() -> dict[tuple[str, str], str]:
    """{(kind, name) of each part in the table: what it earns}."""
    written = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    kinds = {heading: kind for kind, heading in KINDS.items()}
    named = re.findall(r"^\*\*(.+?)\*\*: (.+?)\n\n", written, re.MULTILINE | re.DOTALL)
    return {
        (kinds[heading], name): earns
        for heading, text in named
        for name, earns in re.findall(r"`([^`]+)` (\w+(?: \(-?\d+\))?)", " ".join(text.split()))
    }


def in_a_fork(work: Callable[[], tuple[int, int]]) -> tuple[int, int] | None:
    """What a function returns, called in a process of its own: what it switches off is off there alone. None if it does
    not end: a loop waits for what the part does."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    worker = context.Process(target=lambda: there.send(work()))
    worker.start()
    there.close()
    found: tuple[int, int] | None = here.recv() if here.poll(_LONGEST_S) else None
    worker.terminate()
    return found


if __name__ == "__main__":
    main()
