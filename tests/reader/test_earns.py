"""The table of what each part of the reader earns names every part, and says why one stays that earns nothing.

Else: python -m bench.earns --page
"""

from bench.earns import names_on_the_page, parts


def test_each_part_is_in_the_table_of_the_page() -> None:
    assert sorted(names_on_the_page()) == sorted((part.kind, part.name) for part in parts())


def test_a_part_that_earns_nothing_stays_by_decision() -> None:
    earns = names_on_the_page()
    assert not [part.name for part in parts() if earns[part.kind, part.name] == "0" and not part.decision]
