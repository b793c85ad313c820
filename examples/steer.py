"""Learn a steering vector with transformers, and steer the engine with it.

    python examples/steer.py --model Qwen/Qwen3.5-0.8B

The vector is added to the stream that layer LAYER reads. It is trained to make one answer likely
after several prompts. The engine then adds it to requests: the log-probabilities beside their rows
show the loss that training ended with, and generated text follows the vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from demo_checkpoint import demo_checkpoint
from loss_curve import LossCurve, parse_options
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm import LLM, SamplingParams, SteeringVector

LAYER = 4
PROMPTS = ["The kettle", "My cat", "Rain in March", "A train to Ulm"]
ANSWER = " sleeps on the roof."


def answer_loss(model: Any, token_ids: list[int], answer: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return functional.cross_entropy(logits[-len(answer) - 1 : -1], torch.tensor(answer))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__, steps=60, arguments=arguments)
    name = options.model or str(demo_checkpoint(options.cache_dir))
    tokenizer = AutoTokenizer.from_pretrained(name)
    answer = tokenizer(ANSWER, add_special_tokens=False).input_ids
    texts = [tokenizer(prompt).input_ids + answer for prompt in PROMPTS]

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).requires_grad_(False)
    vector = torch.nn.Parameter(torch.zeros(model.get_input_embeddings().weight.shape[1]))
    model.base_model.layers[LAYER].register_forward_pre_hook(
        lambda _, inputs: (inputs[0] + vector, *inputs[1:])
    )
    curve = LossCurve([vector], rate=0.1)
    for _ in range(options.steps):
        curve.step(torch.stack([answer_loss(model, ids, answer) for ids in texts]).mean())

    with torch.no_grad():
        trained = torch.stack([answer_loss(model, ids, answer) for ids in texts]).mean()
    print(f"transformers with the vector: loss {trained:.4f}")
    with LLM(name, max_model_len=256) as llm:
        for scale in (0.0, 0.5, 1.0):
            steering = SteeringVector(vector.detach(), layers=LAYER, scale=scale)
            losses = []
            for sample in llm.extract(texts, layers=LAYER, top_logprobs=1, steering=steering):
                assert sample.token_logprobs is not None
                losses.append(-sample.token_logprobs[-len(answer) - 1 : -1].mean())
            print(f"engine with {scale} of the vector: loss {torch.stack(losses).mean():.4f}")
        params = SamplingParams(max_tokens=len(answer), temperature=0)
        for sample in llm.extract(PROMPTS, LAYER, sampling_params=params, steering=steering):
            assert sample.output is not None
            print(f"{PROMPTS[sample.index]!r} -> {sample.output.text!r}")
    curve.save("Steering: cross-entropy", options.plot or Path("steer-loss.png"))


if __name__ == "__main__":
    main()
