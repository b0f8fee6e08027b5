"""vLLM on vMem: the GPU's page table takes the place of vLLM's block table. See docs/vllm.md.

vLLM finds `plugin.register` by its entry point group ``vllm.general_plugins``, and ``VMEM_VLLM=1`` in the environment
enables it. `patches` lists every function that is replaced in vLLM, and the supported versions.

SPDX-License-Identifier: MIT
"""
