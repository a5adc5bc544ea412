"""`python -m thinkfold`: the same as the `thinkfold` command."""

import sys

from thinkfold.cli.main import main

sys.exit(main())
