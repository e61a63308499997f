"""The name by which job scripts start `ends.may_start`, with the reader of an attempt's logs."""

import sys

from hpc_gpt.core.ends.may_start import main
from hpc_gpt.reader.readers.attempt_cause import read_cause

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], read_cause))
