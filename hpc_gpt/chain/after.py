"""The name by which job scripts start `ends.what_next`."""

import sys

from hpc_gpt.ends.what_next import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
