"""Models that sleep while nobody uses them, and lend their memory meanwhile. It names no engine, and imports none.

`weights` keeps a model's weights in a pool of device memory, with a copy on the host. `activations` has what torch
caches outside the pool. `turns` decides which of several models sleeps, and `serve` holds the requests of one until it
is awake.

SPDX-License-Identifier: MIT
"""
