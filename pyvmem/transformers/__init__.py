"""The KV cache of transformers' ``generate()`` on vMem (docs/transformers.md).

Importing this module registers the attention ``"vmem"`` with transformers: a model that uses it
(``model.set_attn_implementation("vmem")``) reads the cache's slots by their lengths.

`cache` is what ``generate()`` gets, and `layers` are its layers. They share `rows`, the slots, lengths and pages of a
batch, in which `columns` knows the padding and `plan` one pass. `attention` reads them by their lengths. `paged` is for
transformers' continuous batching.

It calls `pyvmem.kv`, `pyvmem.blocks` and `pyvmem.attention`. Begin with `cache`, then `rows`.

SPDX-License-Identifier: MIT
"""

import logging as _logging
import os as _os
from pathlib import Path as _Path

# The layers follow transformers' own closely, and those change within a major version, for example in 5.19 and 5.23.
_FIRST, _LAST = "5.17", "5.24"

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        f"pyvmem.transformers needs transformers {_FIRST} or newer (pip install 'transformers>={_FIRST},<6')"
    ) from error


def _release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


def _check() -> None:
    """Raises ImportError if this release changes a function that the cache follows. Releases that were tried pass."""
    version = _transformers.__version__
    if _release(_FIRST) <= _release(version) <= _release(_LAST) or _os.environ.get("VMEM_TRANSFORMERS_FORCE"):
        return
    why = ""
    if _release(version) > _release(_LAST):
        from pyvmem.transformers.followed import changes

        changed = changes(_Path(_transformers.__file__).parent)
        if not changed:
            _logging.getLogger(__name__).info("transformers %s was not tried, and changes no function in use", version)
            return
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        why = f", which changes {', '.join(changed[:4])}{more}"
    raise ImportError(
        f"pyvmem.transformers is tested with transformers {_FIRST} to {_LAST}, not {version}{why}: "
        f"pip install 'transformers=={_LAST}.*', or set VMEM_TRANSFORMERS_FORCE=1 to try it anyway"
    )


_check()

from pyvmem.transformers.attention import register  # noqa: E402
from pyvmem.transformers.cache import VMemCache  # noqa: E402
from pyvmem.transformers import encoder_decoder as _encoder_decoder  # noqa: E402,F401

register()

__all__ = ["VMemCache", "register"]
