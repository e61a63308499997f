"""The rules of an experiment: generators of the faults of its keys. `core.settings.decide` runs them."""

import re
from dataclasses import fields

from hpc_gpt.core.errors import Fault
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.key_rules import key_rules

# {table of an experiment: the rules of its keys}, in the order of the tables.
TABLES = {entry.name: key_rules(entry.type) for entry in fields(Experiment) if entry.name != "name"}
_KEY = re.compile(rf"\b({'|'.join(TABLES)})\.(\w+)((?:\.[\w-]+)*)|\[({'|'.join(TABLES)})\]")


def keys_of(fault: Fault) -> tuple[str, ...]:
    """The dotted keys and the tables that a fault is about; the keys that its message names, if it does not say."""
    if fault.keys:
        return fault.keys
    found = _KEY.finditer(fault.message)
    return tuple(dict.fromkeys(one[4] or one[0] for one in found if one[4] or one[2] in TABLES[one[1]]))
