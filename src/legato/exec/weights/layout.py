"""The tensors a model must have, by canonical name, and the strict comparison with those it has."""

from __future__ import annotations

from collections.abc import Mapping

from legato.errors import ModelCorrupt
from legato.exec.spec import ModelSpec

_LISTED = 8
"""Names in one message; the rest is counted."""

Shape = tuple[int, ...]


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Canonical name -> (out, in) of a matrix or (size,) of a vector, in the order of the model."""
    hidden, q, kv = spec.hidden, spec.q_width, spec.kv_width
    shapes: dict[str, Shape] = {"token_embd.weight": (spec.vocab, hidden)}
    for layer in range(len(spec.layers)):
        block: dict[str, Shape] = {"attn_norm.weight": (hidden,)}
        block |= {"attn_q.weight": (q, hidden), "attn_k.weight": (kv, hidden), "attn_v.weight": (kv, hidden)}
        if spec.qkv_bias:
            block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if spec.qk_norm:
            block |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
        block["attn_output.weight"] = (hidden, q)
        if spec.post_norms:
            block["post_attention_norm.weight"] = (hidden,)
        block["ffn_norm.weight"] = (hidden,)
        block |= {"ffn_gate.weight": (spec.ffn, hidden), "ffn_up.weight": (spec.ffn, hidden)}
        block["ffn_down.weight"] = (hidden, spec.ffn)
        if spec.post_norms:
            block["post_ffw_norm.weight"] = (hidden,)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["output.weight"] = (spec.vocab, hidden)
    return shapes


def check_tensors(source: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """ModelCorrupt naming every tensor that is missing, extra or of a wrong shape (with both shapes)."""
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append("missing " + _listed(missing))
    if extra := [name for name in found if name not in expected]:
        problems.append("not part of this architecture " + _listed(extra))
    if wrong := [
        f"{name} is {_text(found[name])}, should be {_text(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]:
        problems.append("of a wrong shape " + _listed(wrong))
    if problems:
        raise ModelCorrupt(f"{source}: tensors " + "; ".join(problems))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"({len(names)}): " + ", ".join(names[:_LISTED]) + more


def _text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
