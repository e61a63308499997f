"""The name by which job scripts start `program.script_watch`."""

import sys

from hpc_gpt.trainer.program.script_watch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
