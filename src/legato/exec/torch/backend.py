"""The decoder over `TorchOps`, behind the interface every backend has."""

from __future__ import annotations

import numpy as np
import torch

from legato.exec.batch import Batch
from legato.exec.decoder import DecoderWeights, forward
from legato.exec.ops import FloatArray
from legato.exec.spec import ModelSpec
from legato.exec.torch.kv import TorchKv
from legato.exec.torch.ops import TorchOps, Vectors
from legato.exec.torch.rows import Rows


class TorchBackend:
    """Runs batches eagerly on the device of `kv`. Weights are tensors there, float32, bfloat16 or float16."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights[torch.Tensor], kv: TorchKv) -> None:
        self.spec = spec
        self.weights = weights
        self.kv = kv
        self._device = kv.keys.device
        self._vectors = Vectors(self._device)

    def run(self, batch: Batch) -> FloatArray:
        """Logits `[len(batch.logit_rows), vocab]`; keys and values of all rows are in `kv` afterwards."""
        with torch.inference_mode():
            rows = Rows.of(batch, self.kv.layout.block_tokens, self._device)
            logits = forward(TorchOps(self.kv, rows, self._vectors), self.spec, self.weights)
            return np.asarray(logits.float().cpu().numpy())
