"""The files of a model's weights on this machine: how much room a model asks for before it is loaded. Calls nothing.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
from pathlib import Path


def folder_of(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The folder of a model's files; None if they are not on this machine. The arguments are as of `weight_bytes`."""
    if os.path.isdir(model):  # also False for a name that is too long, or a folder that may not be read
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception:  # it is not installed, the name is none of its names, or nothing was downloaded yet
        return None


def weight_bytes(model: str, revision: str | None = None, cache: str | None = None) -> int:
    """Bytes of the files, about as many as the weights take; 0 if they are not on this machine.

    model : a folder, or a name whose files are in Hugging Face's cache. cache: the folder of that; None: where it is.
    """
    folder = folder_of(model, revision, cache)
    # Some models come twice, in a second format beside model*.safetensors.
    for pattern in ("model*.safetensors", "*.safetensors", "*.bin") if folder else ():
        if found := list(folder.glob(pattern)):  # type: ignore[union-attr]
            return sum(file.stat().st_size for file in found if os.path.isfile(file))
    return 0
