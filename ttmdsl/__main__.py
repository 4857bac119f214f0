"""`python -m ttmdsl`: the command line."""

import sys

from ttmdsl.cli import main

sys.exit(main())
