"""SGLang's models with other heads, and a mixture whose shared expert alone can have adapters. Imported by SGLang only.

SGLang's heads of Qwen classifiers have a bias, which no checkpoint fills: every score is off by the number that it is
initialised with. Its log-probabilities of given tokens are at temperature 1 whatever a request says; a language model
whose config.json has `logit_scale` multiplies its logits by it, before everything that is computed from them. The
layers of its Mixtral choose experts without saying which layer they are, so that no choice could be recorded.

SGLang takes the names gate_up_proj and down_proj in a mixture as those of all experts: it reserves adapters for each of
them and computes with them. The layers of the shared expert have other names here (`config.lora.SERVED_AS`), each of
which SGLang knows as one plain layer. Where config.json has no `has_adapted_shared_expert`, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear
from sglang.srt.lora.utils import get_default_hidden_dim
from sglang.srt.models import (
    llama,
    mixtral,
    qwen2,
    qwen2_classification,
    qwen2_moe,
    qwen3,
    qwen3_classification,
    qwen3_moe,
)

from megarl.config.lora import SERVED_AS, SHARED_EXPERT, served_name


def _without_bias(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    class Classifier(base):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.get_submodule("score").register_parameter("bias", None)

    return _named(Classifier, base)


def _with_scale(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    class Scaled(base):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.logits_processor.logit_scale = getattr(self.config, "logit_scale", None)

    return _named(Scaled, base)


def _with_layer_numbers(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    class Numbered(base):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            for index, layer in enumerate(self.model.layers):
                layer.block_sparse_moe.topk.layer_id = index

    return _named(Numbered, base)


def _named(model: type[torch.nn.Module], base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Give a class the name by which SGLang finds it: that of `architectures` in a config.json."""
    model.__name__ = model.__qualname__ = base.__name__
    return model


_GATE, _UP, _DOWN = (SERVED_AS[module] for module in ("gate_proj", "up_proj", "down_proj"))


class SharedExpert(torch.nn.Module):
    def __init__(self, own: torch.nn.Module, *, quant_config: Any, prefix: str) -> None:
        super().__init__()
        both = own.get_submodule("gate_up_proj")
        assert isinstance(both, MergedColumnParallelLinear), f"gate_up_proj is a {type(both).__name__}"
        for name, width in zip((_GATE, _UP), both.output_sizes, strict=True):
            layer = ColumnParallelLinear(
                both.input_size,
                width,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
                tp_rank=both.tp_rank,
                tp_size=both.tp_size,
            )
            self.add_module(name, layer)
        self.add_module(_DOWN, own.get_submodule("down_proj"))
        self.activation = own.get_submodule("act_fn")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Looked up here: SGLang replaces the layers by others with adapters.
        gate, up, down = (self.get_submodule(name) for name in (_GATE, _UP, _DOWN))
        activated = self.activation(torch.cat([gate(tokens)[0], up(tokens)[0]], dim=-1))
        output: torch.Tensor = down(activated)[0]
        return output


def with_shared_expert(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    class Adaptable(base):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._is_adapted = getattr(self.config, "has_adapted_shared_expert", False)
            if self._is_adapted:
                for index, layer in enumerate(self.model.layers):
                    prefix = f"model.layers.{index}.mlp.{SHARED_EXPERT}"
                    layer.mlp.shared_expert = SharedExpert(
                        layer.mlp.shared_expert, quant_config=self.quant_config, prefix=prefix
                    )

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
            renamed = ((served_name(name), tensor) for name, tensor in weights)
            return super().load_weights(renamed if self._is_adapted else weights)

        def get_hidden_dim(self, module_name: str, layer_idx: int) -> tuple[int, int]:
            """Return the widths of a module's input and output: SGLang's hook for adapters."""
            hidden, width = self.config.hidden_size, self.config.shared_expert_intermediate_size
            if module_name in (_GATE, _UP):
                return hidden, width
            if module_name == _DOWN:
                return width, hidden
            size: tuple[int, int] = get_default_hidden_dim(module_name, self.config, layer_idx)
            return size

    return _named(Adaptable, base)


EntryClass = [
    _without_bias(qwen2_classification.Qwen2ForSequenceClassification),
    _without_bias(qwen3_classification.Qwen3ForSequenceClassification),
    _with_scale(llama.LlamaForCausalLM),
    _with_layer_numbers(_with_scale(mixtral.MixtralForCausalLM)),
    _with_scale(qwen2.Qwen2ForCausalLM),
    with_shared_expert(_with_scale(qwen2_moe.Qwen2MoeForCausalLM)),
    _with_scale(qwen3.Qwen3ForCausalLM),
    _with_scale(qwen3_moe.Qwen3MoeForCausalLM),
]
