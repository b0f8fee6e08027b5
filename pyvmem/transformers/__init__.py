"""The KV cache of transformers' ``generate()`` on vMem (docs/transformers.md).

Importing this module registers the attention ``"vmem"`` with transformers: a model that uses it
(``model.set_attn_implementation("vmem")``) reads the cache's slots by their lengths.

SPDX-License-Identifier: MIT
"""

import os as _os

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError("pyvmem.transformers needs transformers 5.17 (pip install 'pyvmem[transformers]')") from error

# The layers follow transformers' own closely, and those change within a major version, for example in 5.23.
_TRIED = "5.17"
if not f"{_transformers.__version__}.".startswith(f"{_TRIED}.") and not _os.environ.get("VMEM_TRANSFORMERS_FORCE"):
    raise ImportError(
        f"pyvmem.transformers is tested with transformers {_TRIED}, not {_transformers.__version__}: "
        f"pip install 'transformers=={_TRIED}.*', or set VMEM_TRANSFORMERS_FORCE=1 to try it anyway"
    )

from pyvmem.transformers.attention import register  # noqa: E402
from pyvmem.transformers.cache import VMemCache  # noqa: E402
from pyvmem.transformers.graphs import DecodeGraphs  # noqa: E402

register()

__all__ = ["DecodeGraphs", "VMemCache", "register"]
