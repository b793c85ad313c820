"""Train a draft head of EAGLE-3's kind while the engine extracts, without files.

    python examples/train_eagle_head.py --model Qwen/Qwen3.5-0.8B --steps 1000

The head reads three layers at a token and the embedding of the next token. Its target is the
model's prediction at that next token: the state after the final norm ("norm") times the LM head.
Only the first drafted token is trained; EAGLE-3's trainers unroll several.
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
from transformers import AutoModelForCausalLM

from vllm import AsyncEngineArgs
from vllm.hidden_states import pad_samples
from vllm.training import ExtractingDataset


class DraftHead(torch.nn.Module):
    """One decoder layer over the joined layers and the next token; the LM head is the model's."""

    def __init__(self, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        super().__init__()
        width = embedding.shape[1]
        self.embedding, self.lm_head = embedding, lm_head
        self.join = torch.nn.Linear(4 * width, width)
        self.layer = torch.nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True
        )

    def forward(self, rows: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """rows: [samples, tokens, 3, hidden]. Returns log-probabilities of the token after next."""
        parts = torch.cat([rows, self.embedding[next_ids].unsqueeze(2)], dim=2)
        joined = self.join(functional.rms_norm(parts, parts.shape[-1:]).flatten(2))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(rows.shape[1])
        states = self.layer(joined, src_mask=mask, is_causal=True)
        logprobs: torch.Tensor = (states @ self.lm_head.T).log_softmax(-1)
        return logprobs


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__, steps=60, arguments=arguments)
    torch.manual_seed(0)
    model = options.model or str(demo_checkpoint(options.cache_dir))
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
    lm_head = whole.get_output_embeddings().weight
    head = DraftHead(whole.get_input_embeddings().weight, lm_head)
    curve = LossCurve([*head.parameters()], rate=1e-3)

    args = AsyncEngineArgs(model, max_model_len=1024)
    with ExtractingDataset(
        args, load_texts(), layers="eagle3,norm", dtype="float32", shuffle=True
    ) as dataset:
        loader = DataLoader(dataset, batch_size=8, collate_fn=pad_samples)
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(epochs, options.steps):
            found = head(batch.rows[:, :-1, :3], batch.token_ids[:, 1:])
            target = (batch.rows[:, 1:, -1] @ lm_head.T).log_softmax(-1)
            divergence = functional.kl_div(found, target, reduction="none", log_target=True)
            curve.step(divergence.sum(-1)[batch.mask[:, 1:]].mean())
        print(f"the trainer waited {dataset.waited_seconds:.1f} s for rows")
    curve.save("EAGLE-3 head: KL divergence", options.plot or Path("train_eagle_head-loss.png"))


if __name__ == "__main__":
    main()
