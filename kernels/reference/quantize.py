"""From queries, keys and values to codes: smooth, balance, rotate, quantize (the contract's steps 1 and 2)."""

from __future__ import annotations

import torch

from fp8attn.kernels.problem import Masking, QuantizedQKV, Rotary
from fp8attn.recipe import Recipe
from fp8attn.scaling import quantize_tensor
from fp8attn.transforms import Smoothing, balance_factors, channel_mean, make_transform, mean_out_helps

__all__ = ["fit_smoothing", "quantize_qkv"]

# Finite inputs are brought under 1.2e27, so that no difference to a mean, no FP32 sum of a rotation and no sum of 2^24
# weighted values overflows and makes NaN of infinities.
_LARGEST = 2.0**90
_SAMPLED_ROWS = 64  # query rows a head on which smooth_k="auto" decides
_SAMPLED_QUERIES = 1024  # a head at least, if there are as many, of which queries' rms is taken


def quantize_qkv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    masking: Masking,
    *,
    scale: float,
    smoothing: Smoothing | None = None,
    rotary: Rotary | None = None,
) -> QuantizedQKV:
    """Quantize (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv) tensors.

    ``rotary`` turns queries and keys before anything else. ``smoothing`` is fitted to the tokens in use, or given
    (frozen statistics). ``scale``, the softmax scale, serves the decision of ``smooth_k="auto"`` alone. Autocast does
    not apply.
    """
    with torch.autocast(query.device.type, enabled=False):
        queries_in_use, keys_in_use = masking.in_use
        # Contiguous, because sums over strided memory would have another order and the answer other bits.
        q, k, v = (_bounded(x.to(torch.float32).contiguous()) for x in (query, key, value))
        if rotary is not None:
            q, k = rotary.rotate(q, masking.diagonal), rotary.rotate(k)
        q, k, v = _keep(q, queries_in_use), _keep(k, keys_in_use), _keep(v, keys_in_use)
        if smoothing is None:
            smoothing = fit_smoothing(q, k, v, recipe, masking, scale=scale)
        group = q.shape[1] // max(1, k.shape[1])
        logit_shift = v_mean = None
        if smoothing.k_mean is not None:
            # Products of finite values stay finite in float64; the clamp is the one that logits get.
            shift = (q.double() * smoothing.k_mean.double().repeat_interleave(group, dim=1)).sum(dim=-1)
            logit_shift = shift.clamp(-1e38, 1e38).float()
            k = _keep(k - smoothing.k_mean, keys_in_use)
        if smoothing.v_mean is not None:
            v_mean = smoothing.v_mean.expand(v.shape[0], -1, -1, -1)
            v = _keep(v - v_mean, keys_in_use)
        if smoothing.balance is not None:
            q = q * smoothing.balance.repeat_interleave(group, dim=1)
            k = k / smoothing.balance
        if recipe.rotate != "none":
            transform = make_transform(recipe.rotate, q.shape[-1], seed=recipe.seed)
            q, k = transform.apply(q), transform.apply(k)
        return QuantizedQKV(
            q=quantize_tensor(q, recipe.q_format, recipe.q_scale, scale_mode=recipe.scale_mode),
            k=quantize_tensor(k, recipe.k_format, recipe.k_scale, scale_mode=recipe.scale_mode),
            v=quantize_tensor(v, recipe.v_format, recipe.v_scale, scale_mode=recipe.scale_mode),
            recipe=recipe,
            dtype=query.dtype,
            logit_shift=logit_shift,
            v_mean=v_mean,
            keys_in_use=keys_in_use,
        )


def fit_smoothing(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, masking: Masking, *, scale: float
) -> Smoothing:
    """The statistics that the recipe asks for, over the tokens in use; tokens with NaN or infinity are left out.

    Of queries, which have a part in the balance alone, a sample will do: every n-th, n = max(1, Sq // 1024).
    """
    if 0 in (q.shape[1], k.shape[1]):
        return Smoothing()
    queries_in_use, keys_in_use = masking.in_use
    q_valid, k_valid = _finite_tokens(q, queries_in_use), _finite_tokens(k, keys_in_use)
    q_sampled = torch.arange(q.shape[2], device=q.device) % max(1, q.shape[2] // _SAMPLED_QUERIES) == 0
    k_mean = None
    if recipe.smooth_k is not False:
        k_mean = channel_mean(k, k_valid)
        if recipe.smooth_k == "auto":
            helps = _mean_out_helps(q, k, recipe, masking, scale, q_valid, q_sampled, k_valid)
            k_mean = torch.where(helps[..., None, None], k_mean, 0.0)
    balance = None
    if recipe.balance == "rms":
        balance = balance_factors(q, k if k_mean is None else k - k_mean, q_valid=q_valid & q_sampled, k_valid=k_valid)
    v_mean = channel_mean(v, _finite_tokens(v, keys_in_use)) if recipe.smooth_v else None
    return Smoothing(k_mean=k_mean, v_mean=v_mean, balance=balance)


def _mean_out_helps(
    q: torch.Tensor,
    k: torch.Tensor,
    recipe: Recipe,
    masking: Masking,
    scale: float,
    q_valid: torch.Tensor,
    q_sampled: torch.Tensor,
    k_valid: torch.Tensor,
) -> torch.Tensor:
    """(B, Hkv) boolean, from the attention weights of sampled rows; one kv head at a time to bound the memory."""
    batch, num_q_heads, seqlen_q, _ = q.shape
    num_kv_heads, seqlen_k = k.shape[1], k.shape[2]
    if min(batch, num_kv_heads, seqlen_q, seqlen_k) == 0:
        return torch.zeros(batch, num_kv_heads, dtype=torch.bool, device=q.device)
    rows = torch.linspace(0, seqlen_q - 1, min(seqlen_q, _SAMPLED_ROWS), device=q.device).round().long()
    band = masking.band(rows, torch.arange(seqlen_k, device=q.device))
    group = num_q_heads // num_kv_heads
    decisions = torch.zeros(batch, num_kv_heads, dtype=torch.bool, device=q.device)
    for b in range(batch):
        mask = masking.mask_tile(b, rows, slice(0, seqlen_k))
        seen = band if mask is None else band & (mask if mask.dtype == torch.bool else mask > -torch.inf)
        for g in range(num_kv_heads):
            heads = slice(g * group, (g + 1) * group)
            of_heads = heads if mask is not None and mask.shape[0] > 1 else slice(None)
            visible = (seen[of_heads] if mask is not None else seen) & q_valid[b, heads][:, rows, None] & k_valid[b, g]
            q_rows, keys = q[b : b + 1, heads, rows], k[b : b + 1, g : g + 1]
            logits = (q_rows @ keys.mT).mul_(scale)
            if mask is not None and mask.dtype != torch.bool:
                logits += mask[of_heads]
            weights = logits.masked_fill_(~visible, -torch.inf).softmax(
                dim=-1
            )  # NaN for an empty row, which counts as 0
            helps = mean_out_helps(
                q_rows, keys, weights, q=q[b : b + 1, heads],
                rotated=recipe.rotate != "none", balanced=recipe.balance == "rms",
                q_valid=q_valid[b : b + 1, heads] & q_sampled, k_valid=k_valid[b : b + 1, g : g + 1],
            )  # fmt: skip
            decisions[b, g] = helps[0, 0]
    return decisions


def _keep(x: torch.Tensor, in_use: torch.Tensor | None) -> torch.Tensor:
    """Zero the tokens that are not in use: whatever they hold, NaN included, goes no further."""
    return x if in_use is None else torch.where(in_use[:, None, :, None].to(x.device), x, 0.0)


def _bounded(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isinf(), x, x.clamp(-_LARGEST, _LARGEST))


def _finite_tokens(x: torch.Tensor, in_use: torch.Tensor | None) -> torch.Tensor:
    """(B, H, S): tokens in use whose every channel is finite."""
    finite = x.isfinite().all(dim=3)
    return finite if in_use is None else finite & in_use[:, None].to(x.device)
