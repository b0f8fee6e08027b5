"""Measurements of engines on vMem, for those who repeat docs/results. They are not part of the installed package.

``python -m benchmarks`` in the repository's root runs them, and those of ``pyvmem bench``.

SPDX-License-Identifier: MIT
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """The variables of a process that runs a module of this package, from any folder."""
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
