"""The settings of vLLM on vMem: environment variables, which vLLM's processes inherit. See docs/vllm.md.

SPDX-License-Identifier: MIT
"""

import os
from collections.abc import Mapping

from pyvmem.engine import settings
from pyvmem.engine.settings import Settings

SWITCH = "VMEM_VLLM"
LAYOUTS = ("auto", "vllm", "slots")


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment, as `pyvmem.engine.settings.read` has them."""
    return settings.read(SWITCH, LAYOUTS, environ, sleeps=True)
