"""Distil a model into a smaller one from its K most likely next tokens.

    python examples/distill.py --model Qwen/Qwen3.5-0.8B --steps 2000

The engine is the teacher: each token comes with K log-probabilities instead of the whole
vocabulary. The loss is the divergence over these K tokens and the rest taken together, so that the
student also learns how much probability the rest has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_checkpoint import demo_checkpoint, load_texts
from loss_curve import LossCurve, parse_options
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from vllm import AsyncEngineArgs
from vllm.hidden_states import pad_samples
from vllm.training import ExtractingDataset

TOP_K = 32
TEMPERATURE = 1.0


def with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """[..., K] log-probabilities -> [..., K + 1], with that of all other tokens."""
    rest = torch.log1p(-logprobs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([logprobs, rest], dim=-1)


def make_student(model: str) -> torch.nn.Module:
    """Make a Llama of two layers, with random weights and the teacher's vocabulary."""
    teacher = AutoConfig.from_pretrained(model).get_text_config()
    config = LlamaConfig(
        vocab_size=teacher.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    student: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return student


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__, steps=120, arguments=arguments)
    torch.manual_seed(0)
    model = options.model or str(demo_checkpoint(options.cache_dir))
    student = make_student(model)
    curve = LossCurve([*student.parameters()], rate=5e-3)
    args = AsyncEngineArgs(model, max_model_len=1024)
    texts = [text[:120] for text in load_texts()]
    with ExtractingDataset(
        *(args, texts, [0]),  # a row has to be of some layer; the embedding costs least
        top_logprobs=TOP_K,
        logprob_temperature=TEMPERATURE,
        shuffle=True,
    ) as dataset:
        loader = DataLoader(dataset, batch_size=8, collate_fn=pad_samples)
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(epochs, options.steps):
            logits = student(input_ids=batch.token_ids).logits / TEMPERATURE
            top_ids = batch.tensors["top_token_ids"].long()
            found = with_rest(logits.log_softmax(-1).gather(-1, top_ids))
            target = with_rest(batch.tensors["top_logprobs"])
            divergence = functional.kl_div(found, target, reduction="none", log_target=True)
            curve.step(divergence.sum(-1)[batch.mask].mean())
    curve.save("Distillation: KL divergence", options.plot or Path("distill-loss.png"))


if __name__ == "__main__":
    main()
