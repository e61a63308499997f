"""The flows of docs/architecture.md are true: every module of a chain is there, and every arrow is an import."""

import re

import pytest

from tests.conftest import REPOSITORY
from tests.test_imports import MAY_IMPORT, MODULES, imports_of, own_module

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
ARROW = re.compile(r" (->|<-|=[\w.]+=>) ")
CHAINS = [line.strip() for line in PAGE.splitlines() if line.startswith("    ") and ARROW.search(line)]


def imported_by(module: str) -> set[str]:
    return {own_module(name) for name, _ in imports_of(MODULES[module]) if name.startswith("hpc_gpt.")}


def test_the_page_is_short_and_has_five_flows():
    assert len(PAGE.partition("\n## Glossary\n")[0].splitlines()) <= 165
    assert len(CHAINS) == 5


def test_the_picture_is_small_and_names_rooms_that_are_there():
    picture = PAGE.partition("## The way of a run")[2].split("```")[1]
    assert len(picture.splitlines()) <= 20
    rooms = {name for line in picture.splitlines() for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", line[57:])}
    assert len(rooms) > 15
    assert [name for name in rooms if name not in MODULES] == []


@pytest.mark.parametrize("chain", CHAINS, ids=[ARROW.split(chain)[0] for chain in CHAINS])
def test_every_arrow_of_a_chain_is_an_import(chain):
    modules, arrows = ARROW.split(chain)[::2], ARROW.split(chain)[1::2]
    assert 5 <= len(modules) <= 8
    assert [module for module in modules if module not in MODULES] == []
    for before, arrow, after in zip(modules, arrows, modules[1:], strict=False):
        if "=" not in arrow:
            imports, imported = (before, after) if arrow == "->" else (after, before)
            assert imported in imported_by(imports), f"{before} {arrow} {after}"
            assert imports not in imported_by(imported), f"{before} {arrow} {after}"


def test_its_table_is_the_one_of_the_imports():
    table = PAGE.partition("## The rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+) \| ?(.*) \|$", table, re.M)
    assert {room: set(re.findall(r"`([\w.]+)`", others)) for room, _, others in rows} == MAY_IMPORT
    assert [room for room, *_ in rows] == list(MAY_IMPORT)
