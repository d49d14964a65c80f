"""The numerical contract in plain PyTorch, on any device: what every other backend is held to."""

from fp8attn.kernels.reference.forward import State, attend, attend_keys, finish, merge
from fp8attn.kernels.reference.quantize import quantize_qkv

__all__ = ["State", "attend", "attend_keys", "finish", "merge", "quantize_qkv"]
