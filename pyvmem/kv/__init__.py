"""The KV-cache manager (docs/kv-cache.md). `pyvmem.KVCache` and its relatives are exported by `pyvmem` itself.

`cache` is the manager, `arguments` what its calls take, `types` and `shortage` what they return, `pool` the budget that
the caches of a device share. `prefix` finds rows by the tokens that they are of. `view` shows a cache to other
processes, and needs no torch.

It calls libvmem and `pyvmem.core`, and no engine. Begin with `cache`.

SPDX-License-Identifier: MIT
"""
