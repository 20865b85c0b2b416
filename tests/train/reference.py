"""A slow, obvious trainer: the Hugging Face model in one process, one sequence at a time, with AdamW."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GptOssForCausalLM,
    MixtralForCausalLM,
    PretrainedConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.config.algorithm import AlgorithmConfig, PolicyGradientConfig, PpoLossConfig, SftConfig
from megarl.config.roles import OptimizerConfig
from megarl.data.images import ImageStore
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.train.rank_spec import ImageFiles
from megarl.types import TrainSample
from tests.tiny_models import is_read, load_adapted


@dataclass(frozen=True, kw_only=True)
class Model:
    folder: Path
    shape: ModelShape


@dataclass(frozen=True, kw_only=True)
class Token:
    """The inputs of one loss token's term."""

    logprob: Tensor
    entropy: Tensor
    old_logprob: float
    advantage: float


def adamw(
    parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig, stacks: Collection[torch.nn.Parameter] = ()
) -> torch.optim.AdamW:
    """Return the optimizer of a recipe: weights of norms and biases do not decay, nor do `stacks` of biases."""
    kept = {p for p in parameters if p.dim() == 1} | set(stacks)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p not in kept], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p in kept], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


class Reference:
    images: ImageFiles | None = None
    """Set where samples have images."""

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        *,
        adapter: Path | None = None,
    ) -> None:
        """With the folder of an `adapter`, peft trains it and nothing else."""
        loader = AutoModelForCausalLM if model.shape.vision is None else AutoModelForImageTextToText
        self._model = loader.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="eager")
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(is_read(name))
        # transformers gives the padding token no gradient; a trainer that packs sequences has no such token.
        self._model.get_input_embeddings().padding_idx = None
        self._root = family_of(model.shape).root
        self._config = optimizer
        self._algorithm = algorithm
        self._temperature = temperature
        if adapter is not None:
            self._model = load_adapted(model.folder, adapter, is_trainable=True)
            _keep_apart(self._model)
        parameters = [each for each in self._model.parameters() if each.requires_grad]
        stacks = [each for name, each in self._model.named_parameters() if name.endswith("proj_bias")]
        self._adam = adamw(parameters, optimizer, stacks)

    def distributions(self, sample: TrainSample) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at each response token. [T], [T]"""
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()])
        num_response = len(sample.rollout.token_ids)
        logits = self._model(ids[None], **self._images(sample, ids)).logits[0, -num_response - 1 : -1]
        logits = logits / self._temperature
        log_probs = logits.log_softmax(dim=-1)
        chosen = log_probs.gather(1, ids[-num_response:, None])[:, 0]
        return chosen, -(log_probs.exp() * log_probs).sum(dim=-1)

    def _images(self, sample: TrainSample, ids: Tensor) -> dict[str, Tensor]:
        """Return what transformers' processor makes of the sample's images."""
        if not sample.images:
            return {}
        assert self.images is not None, "a sample with images, and no files of them"
        pictures = [Image.open(ImageStore(self.images.store).path(image.digest)) for image in sample.images]
        processor = Qwen2VLImageProcessorPil.from_pretrained(self.images.model)
        made = processor(pictures, do_resize=False, return_tensors="pt")
        kinds = torch.zeros_like(ids)
        for image in sample.images:
            kinds[image.start : image.end] = 1
        return {**made, "mm_token_type_ids": kinds[None]}

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        return [self.distributions(sample)[0] for sample in samples]

    def update(self, samples: Sequence[TrainSample], old: Sequence[Tensor]) -> tuple[float, float, float]:
        """One optimizer update; returns loss, entropy and gradient norm."""
        tokens: list[Token] = []
        for sample, old_logprobs in zip(samples, old, strict=True):
            logprobs, entropy = self.distributions(sample)
            tokens += [
                Token(
                    logprob=logprobs[t],
                    entropy=entropy[t],
                    old_logprob=float(old_logprobs[t]),
                    advantage=float(sample.advantages[t]),
                )
                for t in np.flatnonzero(sample.rollout.loss_mask)
            ]
        loss = torch.stack([self._loss(token) for token in tokens]).mean()
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip_grad_norm)
        self._adam.step()
        entropy_mean = torch.stack([token.entropy for token in tokens]).mean()
        return loss.item(), entropy_mean.item(), grad_norm.item()

    def _loss(self, token: Token) -> Tensor:
        match self._algorithm:
            case SftConfig():
                return -token.logprob
            case PolicyGradientConfig(loss=PpoLossConfig() as clips) as config:
                ratio = (token.logprob - token.old_logprob).exp()
                clipped = ratio.clamp(1 - clips.clip_low, 1 + clips.clip_high)
                loss = torch.maximum(-token.advantage * ratio, -token.advantage * clipped)
                if token.advantage < 0:
                    loss = loss.clamp(max=-token.advantage * clips.clip_dual)
                return loss - config.entropy_coef * token.entropy
            case _:
                raise AssertionError(f"no reference for {self._algorithm}")

    def adapter(self) -> dict[str, Tensor]:
        """Return the tensors of the adapter by their names in its file."""
        from peft import get_peft_model_state_dict

        tensors = {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(self._model).items()}
        for name in [name for name in tensors if ".experts." in name]:
            tensors |= _of_each_expert(name, tensors.pop(name), self._model.config)
        if self._model.config.model_type == "mixtral":
            return {_in_mixtral(name): tensor for name, tensor in tensors.items()}
        return tensors

    def weights(self) -> dict[str, Tensor]:
        weights = {name: each for name, each in checkpoint_weights(self._model).items() if is_read(name)}
        return {re.sub(r"^model\.(language_model\.)?", self._root, name): weight for name, weight in weights.items()}


def _keep_apart(adapted: torch.nn.Module) -> None:
    """Give the blocks of zeros no gradient with which peft makes one matrix of the B of gate and of up."""
    for name, parameter in adapted.named_parameters():
        if ".experts.base_layer.lora_B." in name:
            parameter.register_hook(partial(torch.mul, parameter.detach() != 0))  # type: ignore[no-untyped-call]


def _of_each_expert(name: str, tensor: Tensor, config: PretrainedConfig) -> dict[str, Tensor]:
    """Return the matrices of every expert of one of peft's: all of them below each other, gate and up together."""
    num = getattr(config, "num_experts", None) or config.num_local_experts
    block, _, end = name.partition(".experts.")
    names = ("gate_proj", "up_proj") if end.startswith("base_layer.") else ("down_proj",)
    which = end.removeprefix("base_layer.")
    if which.startswith("lora_A"):
        experts = tensor.reshape(num, -1, tensor.shape[-1])
        parts = experts.chunk(len(names), dim=1)
    else:
        experts = tensor.reshape(len(tensor), -1, num).permute(2, 0, 1)
        rows = experts.chunk(len(names), dim=1)
        parts = tuple(each.chunk(len(names), dim=2)[place] for place, each in enumerate(rows))
        assert len(names) == 1 or not rows[0].chunk(2, dim=2)[1].any(), "peft has trained what is zero"
    return {
        f"{block}.experts.{index}.{part}.{which}": matrices[index].contiguous()
        for part, matrices in zip(names, parts, strict=True)
        for index in range(num)
    }


def checkpoint_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return tensors by their names in a checkpoint, one tensor per expert."""
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        prefix, is_expert, stacked = name.rpartition(".experts.")
        if not is_expert:
            weights[name] = parameter.detach().clone()
            continue
        for index, matrix in enumerate(parameter.detach()):
            if isinstance(model, GptOssForCausalLM):
                weights[f"{prefix}.experts.{index}.{stacked}"] = matrix.t().clone()
                continue
            parts = ("gate_proj", "up_proj") if stacked == "gate_up_proj" else (stacked,)
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                weights[f"{prefix}.experts.{index}.{part}.weight"] = rows.clone()
    weights |= {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    if isinstance(model, MixtralForCausalLM):
        return {_in_mixtral(name): weight for name, weight in weights.items()}
    return weights


def _in_mixtral(name: str) -> str:
    """Return the name in a checkpoint of what other families call the same."""
    for other, own in ((".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(other, own)
    return name
