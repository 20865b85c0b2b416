"""Gated delta nets of SGLang in torch, for machines without a GPU; `cpu` installs them.

Requests are computed one by one and token by token, prompts and answers alike: the bits of a request depend neither on
the others nor on how much of it is new.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_EPS = 1e-6
"""Added to the squared length of queries and keys, as in SGLang's kernels."""


def convolve(
    values: Tensor,  # [channels, N]
    weight: Tensor,  # [channels, kernel]
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,  # [slots, channels, kernel - 1], updated
    has_initial_state: Tensor,  # [requests]
    cache_indices: Tensor,  # [requests]
    query_start_loc: Tensor,  # [requests + 1]
    seq_lens_cpu: object,
) -> Tensor:
    """Return the short convolution of the new tokens of each request. [channels, N]"""
    del seq_lens_cpu
    outputs, starts = torch.zeros_like(values), query_start_loc.tolist()
    for request, slot in enumerate(cache_indices.tolist()):
        new = values[:, starts[request] : starts[request + 1]]
        before = conv_states[slot] if has_initial_state[request] else torch.zeros_like(conv_states[slot])
        joined = torch.cat((before.to(new.dtype), new), dim=-1)
        outputs[:, starts[request] : starts[request + 1]] = _convolved(joined, weight, bias, activation)
        conv_states[slot] = joined[:, joined.shape[1] - conv_states.shape[-1] :].to(conv_states.dtype)
    return outputs


def convolve_next(
    values: Tensor,  # [requests, channels]
    conv_states: Tensor,  # [slots, channels, kernel - 1], updated
    weight: Tensor,  # [channels, kernel]
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,  # [requests]
) -> Tensor:
    """Return the short convolution of one new token of each request. [requests, channels]"""
    slots = conv_state_indices.long()
    joined = torch.cat((conv_states[slots].to(values.dtype), values[..., None]), dim=-1)
    conv_states[slots] = joined[..., 1:].to(conv_states.dtype)
    return _convolved(joined, weight, bias, activation)[..., 0]


def _convolved(joined: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    kernel = weight.shape[-1]
    length = joined.shape[-1] - kernel + 1
    total = sum(joined[..., ago : ago + length].float() * weight[:, ago, None].float() for ago in range(kernel))
    assert isinstance(total, Tensor), "a convolution without weights"
    if bias is not None:
        total = total + bias[:, None].float()
    return (F.silu(total) if activation in ("silu", "swish") else total).to(joined.dtype)


def gating(rate: Tensor, speed: Tensor, strength: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms of decays, and strengths, in float32. [1, N, heads]"""
    decay = -rate.float().exp() * F.softplus(speed.float() + bias.float())
    return decay[None], torch.sigmoid(strength.float())[None]


def read_prompts(
    *,
    q: Tensor,  # [1, N, key heads, key]
    k: Tensor,  # [1, N, key heads, key]
    v: Tensor,  # [1, N, value heads, value]
    g: Tensor,  # [1, N, value heads]
    beta: Tensor,  # [1, N, value heads]
    initial_state: Tensor,  # [slots, value heads, value, key], updated
    initial_state_indices: Tensor,  # [requests]
    cu_seqlens: Tensor,  # [requests + 1]
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """Return what the queries of new tokens read from the states of their requests. [1, N, value heads, value]"""
    assert use_qk_l2norm_in_kernel, "queries and keys have unit length"
    assert not head_first, "tokens come first"
    output, starts = torch.empty_like(v), cu_seqlens.tolist()
    for request, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for token in range(starts[request], starts[request + 1]):
            decay, strength = g[0, token].exp(), beta[0, token]
            state, output[0, token] = _read(state, q[0, token], k[0, token], v[0, token], decay, strength)
        initial_state[slot] = state.to(initial_state.dtype)
    return output, None, None


def read_next(
    rate: Tensor,
    bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Return what the one new token of each request reads. [1, requests, value heads, value]"""
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0), "torch's own"
    decay, strength = gating(rate, a.flatten(0, -2), b.flatten(0, -2), bias)
    output, _, _ = read_prompts(
        q=q,
        k=k,
        v=v,
        g=decay,
        beta=strength,
        initial_state=states,
        initial_state_indices=slots,
        cu_seqlens=starts,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return output


def _read(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after a token, and what its query reads. [heads, value, key], [heads, value]"""
    repeats = len(v) // len(k)
    query, key = (_unit(each.float()).repeat_interleave(repeats, dim=0)[:, None] for each in (q, k))
    state = state * decay[:, None, None]
    correction = (v.float() - (state * key).sum(-1)) * strength[:, None]
    state = state + correction[..., None] * key
    return state, ((state * query).sum(-1) * q.shape[-1] ** -0.5).to(v.dtype)


def _unit(values: Tensor) -> Tensor:
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + _EPS)


def gated_norm(
    values: Tensor, gate: Tensor, weight: Tensor, bias: None, activation: str, *, eps: float, **_options: object
) -> Tensor:
    assert bias is None, "no family has one"
    assert activation in ("silu", "swish"), activation
    normed = F.rms_norm(values.float(), values.shape[-1:], weight.float(), eps)
    return (normed * F.silu(gate.float())).to(values.dtype)


def gated_norm_of(
    values: Tensor, weight: Tensor, bias: None, *, z: Tensor, eps: float, activation: str = "swish", **_options: object
) -> Tensor:
    """Do as `gated_norm`, with the arguments of Qwen3.5's norm."""
    return gated_norm(values, z, weight, bias, activation, eps=eps)


def split_projected(
    projected: Tensor, numbers: Tensor, key_heads: int, value_heads: int, key: int, value: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values together, gates, strengths and speeds."""
    widths = [2 * key_heads * key + value_heads * value, value_heads * value]
    convolved, gate = torch.split(projected, widths, dim=-1)
    strength, speed = torch.split(numbers, [value_heads, value_heads], dim=-1)
    parts = convolved, torch.unflatten(gate, -1, (value_heads, value)), strength, speed
    return tuple(each.contiguous() for each in parts)  # type: ignore[return-value]  # four of them


def norm_heads(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    """Return the heads of queries and keys normed, one below the other. [N * heads, width]"""
    return _centred(query.reshape(-1, width), query_weight, eps), _centred(key.reshape(-1, width), key_weight, eps)


def norm_gated_heads(
    both: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, width: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do as `norm_heads` where a head's gate follows its query; return the gates as well."""
    query, gate = torch.unflatten(both, -1, (num_heads, 2, width)).unbind(-2)
    return (*norm_heads(query, key, query_weight, key_weight, eps, width), gate.reshape(-1, width).contiguous())


def _centred(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(values.float(), values.shape[-1:], weight.float() + 1, eps).to(values.dtype).contiguous()


def multiply_by_gate(values: Tensor, gate: Tensor) -> None:
    values.mul_(torch.sigmoid(gate.reshape(values.shape).float()).to(values.dtype))


_HEADS = "Tensor query_weight, Tensor key_weight, float eps, int width"
OPERATORS = (
    ("fused_sigmoid_mul_cpu", "(Tensor(a!) values, Tensor gate) -> ()", multiply_by_gate),
    ("fused_qk_gemma_rmsnorm_cpu", f"(Tensor query, Tensor key, {_HEADS}) -> (Tensor, Tensor)", norm_heads),
    (
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        f"(Tensor both, Tensor key, {_HEADS}, int num_heads) -> (Tensor, Tensor, Tensor)",
        norm_gated_heads,
    ),
    (
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
        "(Tensor projected, Tensor numbers, int key_heads, int value_heads, int key, int value) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        split_projected,
    ),
    ("fused_gdn_gating_cpu", "(Tensor rate, Tensor speed, Tensor strength, Tensor bias) -> (Tensor, Tensor)", gating),
    (
        "fused_sigmoid_gating_delta_rule_update_cpu",
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor",
        read_next,
    ),
)
"""Name, schema and function of each operator of SGLang's compiled kernels."""
