"""Qwen classifiers whose head has no bias, like those of Hugging Face.

SGLang's heads have one, which no checkpoint fills: every score is off by the number that it is initialised with.
"""

from __future__ import annotations

import torch
from sglang.srt.models import qwen2_classification, qwen3_classification


def _remove_bias(model: torch.nn.Module) -> None:
    model.get_submodule("score").register_parameter("bias", None)


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):  # type: ignore[misc]
    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        _remove_bias(self)


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):  # type: ignore[misc]
    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        _remove_bias(self)


EntryClass = [Qwen2ForSequenceClassification, Qwen3ForSequenceClassification]
