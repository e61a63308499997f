"""The table of options: each row has a verb, and each rule names options that this verb has."""

import inspect

import click

from hpc_gpt import cli
from hpc_gpt.cli.options import TABLE, Option, option_name
from hpc_gpt.cli.profile import detect


def verbs() -> dict[str, click.Command]:
    ctx = click.Context(cli.group)
    return {name: cli.group.get_command(ctx, name) for name in cli.verbs()} | {"detect": detect}


def test_each_row_has_its_verbs_and_each_verb_its_parameters():
    found = verbs()
    for option in TABLE:
        for verb in option.verbs:
            assert option in found[verb].params, (verb, option.opts)
    for name, verb in found.items():
        taken = inspect.signature(inspect.unwrap(verb.callback)).parameters if verb.callback else {}
        own = [each.name for each in verb.params if each.expose_value and "request" not in taken]
        assert {*own} <= {*taken}, name


def test_each_rule_names_options_of_a_verb_that_has_the_option():
    flags = {"EXPERIMENT", *(flag for option in TABLE for flag in option.opts)}
    assert {flag for option in TABLE for rule in option.rules for flag in rule.flags} <= flags
    for name, verb in verbs().items():
        known = {flag for each in verb.params for flag in (*each.opts, option_name(each))}
        values = {str(each.name): "" for each in verb.params}
        for option in (each for each in verb.params if isinstance(each, Option)):
            for rule in option.rules:
                assert known & {*rule.flags} or rule.flags == ["-o"], (name, option.opts)
                for text in (rule.message, rule.hint):
                    assert "{" not in text.format(**values, option="x", others="y")
