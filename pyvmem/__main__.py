"""``python -m pyvmem``: the command, where it is not installed.

SPDX-License-Identifier: MIT
"""

import sys

from pyvmem.tools.cli import main

sys.exit(main())
