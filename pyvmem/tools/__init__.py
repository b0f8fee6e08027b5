"""The command ``pyvmem``: its subcommands (`cli`), ``doctor`` and ``top``. Benchmarks are in `pyvmem.bench`.

SPDX-License-Identifier: MIT
"""
