"""Attention of SGLang in torch with sinks: logits of heads that take a share of the softmax and have no value.

Used on machines without a GPU, in the place of SGLang's own backend, which has windows and no sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor


class SinkAttention(torch_native_backend.TorchNativeAttnBackend):  # type: ignore[misc]
    """The backend of models without sinks, too: their layers pass none."""

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> Tensor:
        sinks = options.pop("sinks", None)
        is_draft = batch.forward_mode.is_target_verify()
        if sinks is None and not is_draft:
            output: Tensor = super().forward_extend(q, k, v, layer, batch, save_kv_cache, **options)
            return output
        self._store(k, v, layer, batch, save_kv_cache)
        if is_draft:  # the lengths are those without it
            num_drafted = batch.spec_info.draft_token_num
            no_sinks = q.new_full((layer.tp_q_head_num,), -torch.inf)
            lengths, totals = [num_drafted] * len(batch.seq_lens), batch.seq_lens + num_drafted
            return self._attend(q, layer, batch, lengths, totals, no_sinks if sinks is None else sinks)
        return self._attend(q, layer, batch, batch.extend_seq_lens.tolist(), batch.seq_lens, sinks)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> Tensor:
        if (sinks := options.pop("sinks", None)) is None:
            output: Tensor = super().forward_decode(q, k, v, layer, batch, save_kv_cache, **options)
            return output
        self._store(k, v, layer, batch, save_kv_cache)
        return self._attend(q, layer, batch, [1] * len(batch.seq_lens), batch.seq_lens, sinks)

    def _store(self, keys: Tensor, values: Tensor, layer: Any, batch: Any, is_stored: bool) -> None:
        if is_stored and keys is not None:
            place = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, place, keys, values)

    def _attend(
        self, queries: Tensor, layer: Any, batch: Any, lengths: list[int], totals: Tensor, sinks: Tensor
    ) -> Tensor:
        """Attend request by request: its bits do not depend on the others."""
        heads, repeats = layer.tp_q_head_num, layer.tp_q_head_num // layer.tp_k_head_num
        pool = self.token_to_kv_pool
        caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        outputs = []
        for index, query in enumerate(torch.split(queries.view(-1, heads, layer.qk_head_dim), lengths)):
            total = int(totals[index])
            slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[index], :total]
            keys, values = (
                cache[slots].to(query.dtype).transpose(0, 1).repeat_interleave(repeats, 0) for cache in caches
            )
            logits = query.transpose(0, 1) @ keys.transpose(1, 2) * layer.scaling
            ago = torch.arange(total - len(query), total)[:, None] - torch.arange(total)
            is_hidden = ago < 0
            if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
                is_hidden |= ago > layer.sliding_window_size
            logits = logits.masked_fill(is_hidden, -torch.inf)
            share = torch.sigmoid(logits.logsumexp(-1) - sinks.to(logits.dtype)[:, None])
            outputs.append((logits.softmax(-1) @ values * share[..., None]).transpose(0, 1))
        return torch.cat(outputs).flatten(1)
