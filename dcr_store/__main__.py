"""``python -m dcr_store`` is ``dcr``."""

from __future__ import annotations

import sys

from dcr_store.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
