"""Entry point of ``python -m recurl``, the same as the ``recurl`` command."""

import sys

from recurl.cli import main

if __name__ == "__main__":
    sys.exit(main())
