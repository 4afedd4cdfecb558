"""`python -m safeicrl`."""

import sys

from safeicrl.cli import main

sys.exit(main())
