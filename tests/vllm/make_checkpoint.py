"""Gives the tests' model real weights, for a server that has to load them a second time. Runs in vLLM's own venv.

    python make_checkpoint.py MODEL FOLDER

A server that was started with made-up weights (``--load-format dummy``) refuses to load any again.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make(model: Path, folder: Path) -> None:
    """A copy of the model's folder with a checkpoint in it; the same weights every time."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
