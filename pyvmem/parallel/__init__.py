"""One KV cache over the ranks of tensor parallelism: `cache`, and block hashes over it: `hashes` (docs/ranks.md).

SPDX-License-Identifier: MIT
"""
