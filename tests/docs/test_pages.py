"""What README and docs say is what there is: links, length, generated parts, and facts that the code has, too."""

import ast
import re
import shlex
import subprocess
import tomllib
from dataclasses import fields
from typing import get_args

import pytest

from hpc_gpt import __version__, cli
from hpc_gpt.cli.variables import PREFIX, variables_of
from hpc_gpt.core import errors
from hpc_gpt.core.engines import engines
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Matmul, Train
from hpc_gpt.core.settings.experiment_file import find_sweep, load_experiment
from hpc_gpt.core.settings.presets import PRESETS
from hpc_gpt.reader.lines.steps import SLOW_STEP
from tests.cli.document import END, document, mark_of
from tests.cli.document import PAGES as GENERATED
from tests.cli.test_variables import options_of
from tests.conftest import REPOSITORY
from tests.docs.pages import PAGES, README, anchors_of, blocks, text_of
from tests.docs.pictures import PUBLISHED, SIZE, picture_of_plan, published_runs


def test_no_text_names_a_page_that_pip_does_not_install():
    """Docstrings and comments are for readers of the code."""
    for path in sorted((REPOSITORY / "hpc_gpt").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        docstrings = {ast.get_docstring(node, clean=False) for node in documented}
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert [text for text in texts if re.search(r"docs/\S+\.md", text) and text not in docstrings] == [], path


def test_the_readme_is_read_in_one_sitting():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    begin = " ".join(lines[:8])
    assert f"{__version__.rpartition('.')[0]}, beta" in begin
    assert "licence" in begin


def test_the_pages_and_their_lines_are_short():
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "docs"}
    assert sum(text.count("\n") for text in pages.values()) <= 4200  # with recipes for programs and a page for sites
    assert pages["operators.md"].count("\n") <= 60
    for name, text in pages.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        long = [line for line in prose.splitlines() if len(line) > 140 and not line.startswith(("|", "    "))]
        assert not long, f"{name}: {long[0]}"


def section(name: str, heading: str) -> str:
    return re.split(r"^## ", text_of(name).partition(f"\n## {heading}\n")[2], flags=re.MULTILINE)[0]


MEASURED = re.findall(
    r"^\| ([a-z0-9].*?) \| (.*?) \| .*? \| (.*?) \|$", section("README.md", "Measured"), re.MULTILINE
)[1:]


@pytest.mark.parametrize(("measured", "by"), [row[1:] for row in MEASURED], ids=[row[0] for row in MEASURED])
def test_a_measured_figure_is_on_the_page_with_its_command(measured, by):
    page = " ".join(text_of("docs/measurements.md").split())
    for figure in [*re.findall(r"[\d.,]*\d(?:e-\d)?", measured), *re.findall(r"`([^`]+)`", by)]:
        assert figure in page, figure


WITHOUT = re.compile("expert|window|lora|prefer")


def test_what_it_does_not_do_is_so():
    said = section("README.md", "What it does not do")
    assert not [each.name for table in (Engine, Train) for each in fields(table) if WITHOUT.search(each.name)]
    divides = [name for name, facts in engines().items() if "ep" in facts.axes and not facts.takes_command]
    assert sorted(divides) == ["ddp", "fsdp", "megatron-lm"]
    assert "(ep) by ddp, fsdp and Megatron-LM alone" in " ".join(said.split())
    assert "DeepSeek's attention" in said
    assert not [name for name, facts in engines().items() if "kv_lora" in facts.shape_parts]
    trains = {name for name, facts in engines().items() if "fp8-tensor" in facts.matmuls}
    assert f"FP8 in other engines than {' and '.join(sorted(trains))}" in said
    planned = set(get_args(Matmul)) - {matmul for facts in engines().values() for matmul in facts.matmuls}
    assert {"mxfp8", "nvfp4"} <= planned
    assert {axis for facts in engines().values() for axis in facts.axes} == {"tp", "pp", "cp", "ep", "etp"}


# {page: (its blocks of Python, the tests that run them)}
RUN_BY = {
    "docs/checkpoints.md": (1, "tests/trainer/checkpoints/test_states.py"),
    "docs/extending.md": (
        6,
        "tests/reader/programs/test_example_of_the_page.py",
        "tests/core/engines/test_seventh.py",
        "tests/reader/test_new_figure.py",
    ),
    "docs/for-a-site.md": (1, "tests/docs/test_recipes.py"),
    "docs/how-do-i.md": (1, "tests/api/test_page.py"),
    "docs/python.md": (6, "tests/api/test_page.py"),
}


def test_a_test_runs_each_block_of_python():
    """A new block needs a test that runs it, beside those of its page."""
    names = [str(page.relative_to(REPOSITORY)) for page in PAGES]
    counts = {name: len(blocks(name, "python")) for name in names if blocks(name, "python")}
    assert counts == {name: count for name, (count, *_) in RUN_BY.items()}
    for name, (_, *files) in RUN_BY.items():
        for file in files:
            text = (REPOSITORY / file).read_text(encoding="utf-8")
            assert name in text or name.removeprefix("docs/") in text, (name, file)


def test_a_short_answer_is_short_and_has_a_command():
    answers = re.split(r"^## ", text_of("docs/how-do-i.md"), flags=re.MULTILINE)[1:]
    assert len(answers) >= 16
    assert f"[{len(answers)} short answers](docs/how-do-i.md)" in README.read_text(encoding="utf-8")
    for answer in answers:
        text = re.sub(r"^```.*?^```", "", answer.partition("\n")[2], flags=re.DOTALL | re.MULTILINE)
        assert len(text.strip().splitlines()) <= 3, answer
        assert re.search(r"^```(sh|python)\n", answer, re.MULTILINE), answer


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_its_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert "://" in target or there.is_file(), target
        assert not anchor or anchor in anchors_of(there), target


def test_every_page_that_a_file_names_is_there():
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if not name.endswith((".py", ".toml", ".j2", ".sh", ".cfg", "Makefile")) or name.startswith("tests/docs/"):
            continue
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        for file, anchor in re.findall(r"docs/([\w-]+\.md)(?:#([\w-]+))?", text):
            page = REPOSITORY / "docs" / file
            assert page.is_file(), f"{name}: {file}"
            assert not anchor or anchor in anchors_of(page), f"{name}: {file}#{anchor}"


def test_the_newest_changes_are_of_this_version():
    """Until a version is released, its changes are headed Unreleased."""
    newest, before = re.findall(r"^## (\S+?)(?:, \d{4}-\d\d-\d\d)?$", text_of("CHANGELOG.md"), re.MULTILINE)[:2]
    assert newest == __version__ or (newest == "Unreleased" and before != __version__)


def test_every_page_is_in_the_index_and_the_readme_leads_to_it():
    assert "(docs/README.md)" in README.read_text(encoding="utf-8")
    index = text_of("docs/README.md")
    assert [path.name for path in PAGES if path.parent.name == "docs" and f"({path.name})" not in index] == [
        "README.md"
    ]


def test_the_pictures_are_small():
    names = re.findall(r"!\[[^]]+\]\((\S+)\)", README.read_text(encoding="utf-8"))
    assert sorted(names) == ["docs/plan.svg", "docs/report.png"]
    for name in names:
        assert 2_000 < (REPOSITORY / name).stat().st_size < 150_000, name


def test_the_pictures_have_their_size_and_the_plans_its_rows():
    for name in ("report.png", "curves.png"):
        head = (REPOSITORY / "docs" / name).read_bytes()[16:24]  # a PNG's width and height
        assert (int.from_bytes(head[:4]), int.from_bytes(head[4:])) == SIZE == (1280, 640)
    plan = text_of("docs/plan.svg")
    assert plan.startswith('<svg width="1280" height="640" ')
    assert len(set(re.findall(r"tp\d+-pp\d+-dp\d+", plan))) == 10
    assert {"best", "tight:", "fit:"} <= set(re.split(r"[\s<>]|&#160;", plan))


def test_the_reports_picture_is_of_published_figures():
    """The rate and the MFU that the picture has are those of the step times that the source printed."""
    records = [run.record for run in published_runs()]
    published = {row.name: row.published for row in find_sweep(PUBLISHED).rows}
    for record in records:
        step_ms = published[record.run].get("step_ms")
        assert record.ended == ("gpu_memory" if published[record.run]["memory_mb"] == "OOM" else "done")
        assert record.step_s == (step_ms and step_ms / 1000)
        if step_ms:
            tokens = record.micro_batch * record.seq / record.step_s
            assert record.tokens_per_s / record.gpus == pytest.approx(tokens, rel=0.01)
    best = max(records, key=lambda record: record.mfu or 0)
    assert (best.run, round(100 * best.mfu, 1)) == ("ckpt-prefetch-b64", 21.8)


def test_the_picture_of_the_plan_is_current():
    assert picture_of_plan() == text_of("docs/plan.svg"), "run: python -m tests.docs.pictures docs"


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_a_generated_part_is_current(name):
    page = text_of(f"docs/{name}")
    assert document(page, name) == page, f"run: python -m tests.cli.document docs/{name}"


def test_only_the_part_between_the_marks_is_written():
    begin = mark_of("long-runs.md")
    page = document(f"above\n{begin}\nstale line\n{END}\nbelow\n", "long-runs.md")
    assert page.startswith(f"above\n{begin}\n\n| class | means |")
    assert page.endswith(f"\n{END}\nbelow\n")
    assert "stale line\n" not in page
    assert document(page, "long-runs.md") == page


@pytest.mark.parametrize("page", ["", f"{END}\n{mark_of('keys.md')}"])
def test_a_page_without_its_marks_is_refused(page):
    with pytest.raises(ValueError, match="the page has no"):
        document(page, "keys.md")


def test_the_profile_it_shows_is_one(tmp_path):
    (text,) = blocks("docs/profiles.md", "toml")
    (tmp_path / "mysite.toml").write_text(text)
    profile = load_profile(str(tmp_path / "mysite.toml"))
    assert profile.gpus_per_node == 8
    assert profile.sbatch == ("--hint=nomultithread",)


def test_the_experiment_it_shows_runs_on_a_cluster(tmp_path):
    (text,) = blocks("docs/keys.md", "toml")
    assert "extends" not in tomllib.loads(text)  # no settings of another run leak into one's first
    (tmp_path / "myrun.toml").write_text(text)
    run = resolve(load_experiment(str(tmp_path / "myrun.toml")), load_profile("a100-80g-8"))
    assert (run.gpus, run.batch.global_batch, run.name) == (16, 512, "myrun")


REFUSALS = [block for page in ("keys", "models-and-engines") for block in blocks(f"docs/{page}.md", "console")]


@pytest.mark.parametrize("block", REFUSALS)
def test_the_refusals_it_shows_are_what_is_said(block, capsys):
    command, _, said = block.partition("\n")
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(command)[2:])
    captured = capsys.readouterr()
    assert (captured.out, captured.err, end.value.code) == ("", said, 2)


def test_the_variables_they_name_are_read():
    source = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "hpc_gpt").rglob("*.py"))
    source += "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "templates").rglob("*.j2"))
    options = {
        PREFIX + name for verb in ("render", "submit") for each in options_of(verb) for name in variables_of(each)
    }
    named = {name for page in PAGES for name in re.findall(r"HPC_GPT_[A-Z_]+[A-Z]", page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [name for name in sorted(named) if name not in source and name not in options] == []


def test_the_presets_they_name_are_all_there_are():
    said = re.search(r"^- Presets: (.*?)\.\s+Other", text_of("docs/models-and-engines.md"), re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([^`]+)`", said.group(1))
    assert set(named) <= set(PRESETS)
    first, last = named.index("7.5b"), named.index("1t")  # from … to …
    names = list(PRESETS)
    assert set(named) | set(names[names.index("7.5b") : names.index("1t")]) == set(names)
    assert last == first + 1


def test_the_warm_up_rule_is_the_one_in_force():
    assert f"no more than {SLOW_STEP} times the median" in " ".join(text_of("docs/reports.md").split())


def test_the_exit_codes_are_those_of_the_errors():
    table = dict(re.findall(r"\| (\d+) \| ([^|]+)", text_of("docs/files-and-codes.md")))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UserError)]
    assert {str(kind.exit_code) for kind in kinds} | {"0", "130"} == set(table)
