"""Compares a release of transformers that was never tried with the newest tried one, where `VMemCache` relies on it.

Each function or class is known by its fingerprint (`pyvmem.engine.sources`). A release in which all are the same is
accepted: transformers publishes one about every month, and its users need not wait for one of vMem.

``VMEM_TRANSFORMERS_FORCE=1 python -m pyvmem.transformers.followed FOLDER`` prints those of a folder.

SPDX-License-Identifier: MIT
"""

import sys
from pathlib import Path

from pyvmem.engine.sources import Needs

# Of the newest release that `make test-transformers-releases` has passed: {file: {function or class: fingerprint}}.
FOLLOWED = {
    "cache_utils.py": {
        "CacheLayerMixin": "32afea38ce838030", "DynamicLayer": "5e8a8c9c0c06f66b",
        "DynamicSlidingWindowLayer": "88082724e9f1ecc2", "LinearAttentionCacheLayerMixin": "5afa2fec14fc44f6",
        "LinearAttentionLayer": "734760d40d5ec82d", "Cache": "84bf250c97824a01",
        "get_layer_types_and_kwargs": "eee3f31278590f96", "DynamicCache": "c52174ccd6f56174",
        "EncoderDecoderCache": "574241693e6e5d2c",
    },
    "masking_utils.py": {
        "and_masks": "757a09278d2a0d0d", "causal_mask_function": "6133cca20ca97df3",
        "sliding_window_overlay": "f2a8c951a8307c84", "sliding_window_causal_mask_function": "c3674541c55f819d",
        "prepare_padding_mask": "12070f23cb01b67c", "_ignore_causal_mask_sdpa": "795782709e6a069e",
        "sdpa_mask": "f48b6cefc061e929", "eager_mask": "a1c0c11b5d620d86",
        "_preprocess_mask_arguments": "c5a0fa832a5096ac", "create_causal_mask": "3fb067648fe222b5",
        "create_bidirectional_mask": "7f6c2057a1d21033", "create_sliding_window_causal_mask": "37990848193c41bb",
        "create_chunked_causal_mask": "3e6511b8539cad10",
    },
    "integrations/sdpa_attention.py": {
        "repeat_kv": "cbc0336414defd92", "sdpa_attention_forward": "95be3bbfbfe27fac",
    },
}  # fmt: skip

_BODIES = {(file, name): (digest,) for file, known in FOLLOWED.items() for name, digest in known.items()}
NEEDS = Needs("transformers", "transformers", "VMEM_TRANSFORMERS", signatures=(), names={}, bodies=_BODIES)


def changes(folder: Path) -> list[str]:
    """The functions and classes that differ from the newest tried release."""
    return NEEDS.unknown(NEEDS.fingerprints(folder))


if __name__ == "__main__":
    sys.exit(NEEDS.main(sys.argv[1:]))
