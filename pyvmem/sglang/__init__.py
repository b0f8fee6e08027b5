"""SGLang on vMem: a page of SGLang's has memory only while a request or the radix cache uses it. See docs/sglang.md.

SGLang finds `plugin.activate` by its entry point group ``sglang.srt.plugins``, and ``VMEM_SGLANG=1`` in the environment
enables it. vMem's hooks go through SGLang's own registry; `check` knows what they rely on in the supported releases.

It calls `pyvmem.engine`, `pyvmem.sleep` and blocks, nothing further down, and nothing of vLLM's folder. Begin
with `plugin`.

SPDX-License-Identifier: MIT
"""

from pyvmem.core import Context
from pyvmem.engine import pools
from pyvmem.kv.pool import KVPool
from pyvmem.sglang import settings


def open_pool(context: Context) -> KVPool:
    """Open the pool in which engines lend each other memory on a context's device.

    VMEM_SGLANG_POOL and VMEM_SGLANG_POOL_SIZE in the environment name it, with VMEM_SGLANG=1. vLLM's engines whose
    settings name the same pool are members of it, too. See `pyvmem.engine.pools.open_pool` for the errors.
    """
    return pools.open_pool(settings.read(), context)
