"""`python -m convert` is `tfm-convert`."""

import sys

from convert.cli import main

sys.exit(main())
