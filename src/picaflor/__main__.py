"""`python -m picaflor`: the command line without the installed script."""

from __future__ import annotations

import sys

from picaflor.cli import main

sys.exit(main())
