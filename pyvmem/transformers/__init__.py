"""The KV cache of transformers' ``generate()`` on vMem (docs/transformers.md).

Importing this module registers the attention ``"vmem"`` with transformers: a model that uses it
(``model.set_attn_implementation("vmem")``) reads the cache's slots by their lengths.

SPDX-License-Identifier: MIT
"""

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError("pyvmem.transformers needs transformers 5 (pip install 'pyvmem[transformers]')") from error

if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"pyvmem.transformers needs transformers 5 or newer, not {_transformers.__version__}")

from pyvmem.transformers.attention import register
from pyvmem.transformers.cache import VMemCache
from pyvmem.transformers.graphs import DecodeGraphs

register()

__all__ = ["DecodeGraphs", "VMemCache", "register"]
