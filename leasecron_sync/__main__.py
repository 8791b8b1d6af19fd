"""Makes ``python -m leasecron_sync`` the same as the command ``leasecron-sync``."""

from __future__ import annotations

import sys

from leasecron_sync.cli import main

if __name__ == "__main__":
    sys.exit(main())
