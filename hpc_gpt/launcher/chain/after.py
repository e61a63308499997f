"""The name by which job scripts start `ends.what_next`, with the reader of an attempt's logs."""

import sys

from hpc_gpt.core.ends.what_next import main
from hpc_gpt.reader.readers.attempt_cause import read_cause

if __name__ == "__main__":
    # A script that names it so is of an earlier version, which asks scontrol for local times.
    is_earlier = __spec__ is not None and __spec__.name == "hpc_gpt.chain.after"
    sys.exit(main(sys.argv[1:], read_cause, shows_utc=not is_earlier))
