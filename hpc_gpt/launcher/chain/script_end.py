"""The name by which a job script of the user's own starts `ends.what_next`, with the reader of an attempt's logs."""

import sys

from hpc_gpt.core.ends.what_next import end_here
from hpc_gpt.reader.readers.attempt_cause import read_cause

if __name__ == "__main__":
    sys.exit(end_here(sys.argv[1:], read_cause))
