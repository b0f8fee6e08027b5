"""vLLM on vMem: a block of vLLM's has memory only while a request or the prefix cache uses it. See docs/vllm.md.

vLLM finds `plugin.platform` by its entry point group ``vllm.platform_plugins``, and ``VMEM_VLLM=1`` in the environment
enables it. No function of vLLM's is replaced; `check` knows what vMem relies on in the supported releases.

It calls `pyvmem.engine`, `pyvmem.sleep` and blocks, nothing further down, and nothing of SGLang's folder.
Begin with `plugin`, then `scheduler`.

SPDX-License-Identifier: MIT
"""

from pyvmem.core import Context
from pyvmem.engine import pools
from pyvmem.kv.pool import KVPool
from pyvmem.vllm import plugin


def open_pool(context: Context) -> KVPool:
    """Open the pool in which engines of vLLM's lend each other memory on a context's device.

    VMEM_VLLM_POOL and VMEM_VLLM_POOL_SIZE in the environment name it, with VMEM_VLLM=1. There is one for each GPU,
    whose name ends in ``-`` and the first 12 hex digits of the device's UUID, and one for the memory of the host.
    Caches and leases of this process that join it (`pyvmem.torch_pool`, ``KVCache(pool=)``) share the engines' budget.

    Parameters
    ----------
    context : Context
        Of the engines' device.

    Raises
    ------
    ValueError
        VMEM_VLLM is not 1, VMEM_VLLM_POOL is not set, or another setting of vMem's in the environment is wrong.
    InvalidArgument
        The pool exists with another size, or it does not exist and VMEM_VLLM_POOL_SIZE is not set.
    VmemError
        As for `KVPool`.
    """
    return pools.open_pool(plugin.settings(), context)
