"""`python -m thinkfold`: the same as the `thinkfold` command."""

import sys

from thinkfold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
