"""SGLang's models with other heads: classifiers without a bias, and language models that score at a temperature.

SGLang's heads of Qwen classifiers have a bias, which no checkpoint fills: every score is off by the number that it is
initialised with. Its log-probabilities of given tokens are at temperature 1 whatever a request says; a language model
whose config.json has `logit_scale` multiplies its logits by it, before everything that is computed from them. The
layers of its Mixtral choose experts without saying which layer they are, so that no choice could be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
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

from megarl.engine.model_classes.shared_expert import with_shared_expert


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
