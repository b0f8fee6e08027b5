"""Models that sleep while nobody uses them, and lend their memory meanwhile. It names no engine, and imports none.

In a worker, `sleeper` is what an engine's plugin calls. It has `weights`, which are in a pool of device memory with a
copy on the host, and `activations`, which torch caches outside the pool. In a server, `serve` is the middleware. It has
`admission`, which holds requests until the model is awake, and `leader`, which lets it sleep and wake. Both meet other
processes in `pages`, and `turns` has the rules. `standby` is for a second server. Begin with `turns`. Calls go down, to
`pyvmem.engine` and below.

SPDX-License-Identifier: MIT
"""
