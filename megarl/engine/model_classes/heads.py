"""SGLang's models with other heads or Triton's whole window, and a mixture whose shared expert alone has adapters.

Imported by SGLang only. SGLang's heads of Qwen classifiers have a bias, which no checkpoint fills: every score is off
by the number that it is initialised with. Its log-probabilities of given tokens are at temperature 1 whatever a request
says; a language model whose config.json has `logit_scale` multiplies its logits by it, before everything that is
computed from them. The layers of some families choose experts without saying which layer they are, so that no choice
could be recorded. Where Triton decodes, a token with a window sees one token less than in a prompt, and than in
transformers.

SGLang takes the names gate_up_proj and down_proj in a mixture as those of all experts: it reserves adapters for each of
them and computes with them. The layers of the shared expert have other names here (`config.lora.SERVED_AS`), each of
which SGLang knows as one plain layer. Where config.json has no `has_adapted_shared_expert`, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear
from sglang.srt.lora import utils as lora_utils
from sglang.srt.runtime_context import get_exec

from megarl.config.lora import SERVED_AS, SHARED_EXPERT, served_name
from megarl.families import FAMILIES
from megarl.families.interface import Family


def _drop_bias(model: Any) -> None:
    model.score.register_parameter("bias", None)


def _scale_logits(model: Any) -> None:
    model.logits_processor.logit_scale = getattr(model.config, "logit_scale", None)


def _number_layers(model: Any, *, name: str) -> None:
    for index, layer in enumerate(model.model.layers):
        layer.get_submodule(name).layer_id = index


def _widen_window(model: Any) -> None:
    """Let Triton's decoding see the whole window: it counts the token itself among those before it.

    https://github.com/sgl-project/sglang/pull/32087 is not in 0.5.21. The attention of prompts, and other backends,
    take the window of each layer, which stays.
    """
    if hasattr(model, "get_attention_sliding_window_size") and attention_backends_of(get_exec().kernel)[1] == "triton":
        size: int = model.get_attention_sliding_window_size()
        model.get_attention_sliding_window_size = lambda: size + 1


def _changed(base: type[torch.nn.Module], *changes: Callable[[Any], None]) -> type[torch.nn.Module]:
    """Return a class whose models are changed once they are made."""

    class Changed(base):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            for change in changes:
                change(self)

    return _named(Changed, base)


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
            # By its module, so that releases without it serve all that has no adapters.
            size: tuple[int, int] = lora_utils.get_default_hidden_dim(module_name, self.config, layer_idx)
            return size

    return _named(Adaptable, base)


def _classes(family: Family) -> Iterator[type[torch.nn.Module]]:
    """Yield a family's models as SGLang serves them here."""
    engine = family.engine
    if engine.classifier is not None:
        yield _changed(_sglang_class(engine.classifier, family.critic), _drop_bias)
    changes: list[Callable[[Any], None]] = [_scale_logits, _widen_window]
    if engine.unnumbered is not None:
        changes.append(partial(_number_layers, name=engine.unnumbered))
    model = _changed(_sglang_class(engine.module, family.architecture), *changes)
    yield with_shared_expert(model) if engine.adapts_shared_expert else model


def _sglang_class(module: str, name: str) -> type[torch.nn.Module]:
    model: type[torch.nn.Module] = getattr(import_module(f"sglang.srt.models.{module}"), name)
    return model


EntryClass = [model for family in FAMILIES for model in _classes(family)]
