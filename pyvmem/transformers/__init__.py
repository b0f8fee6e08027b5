"""The KV cache of transformers' ``generate()`` on vMem (docs/transformers.md).

Importing this module registers the attention ``"vmem"`` with transformers: a model that uses it
(``model.set_attn_implementation("vmem")``) reads the cache's slots by their lengths.

SPDX-License-Identifier: MIT
"""

import os as _os

# The layers follow transformers' own closely, and those change within a major version, for example in 5.19 and 5.23.
_FIRST, _LAST = "5.17", "5.24"

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        f"pyvmem.transformers needs transformers {_FIRST} to {_LAST}: pip install 'transformers=={_LAST}.*'"
    ) from error


def _release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


_tested = _release(_FIRST) <= _release(_transformers.__version__) <= _release(_LAST)
if not _tested and not _os.environ.get("VMEM_TRANSFORMERS_FORCE"):
    raise ImportError(
        f"pyvmem.transformers is tested with transformers {_FIRST} to {_LAST}, not {_transformers.__version__}: "
        f"pip install 'transformers=={_LAST}.*', or set VMEM_TRANSFORMERS_FORCE=1 to try it anyway"
    )

from pyvmem.transformers.attention import register  # noqa: E402
from pyvmem.transformers.cache import VMemCache  # noqa: E402
from pyvmem.transformers.graphs import DecodeGraphs  # noqa: E402

register()

__all__ = ["DecodeGraphs", "VMemCache", "register"]
