"""The settings of SGLang on vMem: environment variables, which SGLang's processes inherit. See docs/sglang.md.

SPDX-License-Identifier: MIT
"""

import os
from collections.abc import Mapping

from pyvmem.engine import settings
from pyvmem.engine.settings import Settings

SWITCH = "VMEM_SGLANG"
LAYOUTS = ("layers", "tokens")


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment, as `pyvmem.engine.settings.read` has them."""
    return settings.read(SWITCH, LAYOUTS, environ, ("http",))
