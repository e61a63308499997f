"""The table of what each part of the reader earns names every part that is there."""

from tests.benchmarks.earns import names_on_the_page, parts


def test_each_part_is_in_the_table_of_the_page() -> None:
    """Else: python -m tests.benchmarks.earns --page"""
    assert sorted(names_on_the_page()) == sorted((part.kind, part.name) for part in parts())
