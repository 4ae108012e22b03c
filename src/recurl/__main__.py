"""Entry point of ``python -m recurl``, equivalent to the ``recurl`` command."""

import sys

from recurl.cli import main

if __name__ == "__main__":
    sys.exit(main())
