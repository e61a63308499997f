"""The name by which job scripts start `ends.may_start`."""

import sys

from hpc_gpt.ends.may_start import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
