"""The common part of the plugins for serving engines. It names no engine, and imports none.

An engine keeps a table of numbered blocks for its KV cache. A block has memory only while a request or the prefix cache
uses it. `control` is the page of shared memory in which an engine, its workers and its owner meet; `memory` has the
virtual tensor behind the blocks and its part in a pool; `budget` decides how many blocks may have memory; `pool_policy`
decides which of several engines gets it first.

It calls `pyvmem.kv`, blocks and leases, and is called by the engines' folders. Begin with `budget`.

SPDX-License-Identifier: MIT
"""
