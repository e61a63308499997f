"""The name by which job scripts start `ends.script_end`."""

import sys

from hpc_gpt.ends.script_end import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
