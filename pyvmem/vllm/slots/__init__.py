"""Mode "slots": each request's rows follow each other in memory, so attention needs no block table.

`memory` is the worker's side, `requests` places requests in a KV cache, and `attention` is vLLM's backend, over
`kernels`.

SPDX-License-Identifier: MIT
"""
