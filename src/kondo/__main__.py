"""`python -m kondo` is the command `kondo`."""

import sys

from kondo.cli import main

if __name__ == "__main__":
    sys.exit(main())
