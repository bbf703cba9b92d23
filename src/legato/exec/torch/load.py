"""A checkpoint's weights as torch tensors."""

from __future__ import annotations

import torch

from legato.exec.decoder import DecoderWeights
from legato.exec.rope import RopeTable
from legato.exec.weights.read import Progress, read_weights
from legato.exec.weights.tensor import Checkpoint, HostTensor


def torch_weights(
    checkpoint: Checkpoint,
    ropes: tuple[RopeTable, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> DecoderWeights[torch.Tensor]:
    """All weights on `device`, dequantised, matrices rounded to `dtype`. Raises ModelCorrupt."""

    def make(tensor: HostTensor) -> torch.Tensor:
        return torch.from_numpy(tensor.dequantise()).to(device, dtype)

    return read_weights(checkpoint, ropes, make, progress)
