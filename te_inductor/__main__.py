"""`python -m te_inductor`: the command `te-inductor`."""

import sys

from te_inductor.command import main

if __name__ == "__main__":
    sys.exit(main())
