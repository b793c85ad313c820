"""TRL's client and its trainer with a teacher on a server, on a CPU; prints results as JSON.

Arguments: the folder of the model, which is student and teacher, and the address of the server.
"""

from __future__ import annotations

import json
import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
from trl.generation.vllm_client import VLLMClient

from tests.integration.clients.trl_data import LENGTHS, SEQUENCES, TEMPERATURE


def ask(url: str) -> dict[str, object]:
    """Return the client's results from each endpoint."""
    client = VLLMClient(base_url=url)
    chats = [[{"role": "user", "content": text}] for text in ("Why?", "So")]
    found: dict[str, object] = {
        "scores": client.get_sequence_logprobs(SEQUENCES, LENGTHS, 4, TEMPERATURE),
        "generated": client.generate(SEQUENCES, n=2, max_tokens=3, logprobs=2),
        "chat": client.chat(chats, max_tokens=2),
        "world_size": client.get_world_size(),
    }
    client.reset_prefix_cache()
    try:
        client.init_communicator()
    except Exception as error:
        found["refusal"] = str(error)
    return found


def train(model_folder: str, url: str, beta: float) -> list[dict[str, float]]:
    """Two steps of distillation; returns the log. The student does not change."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [[{"role": "user", "content": f"Why {number}?"}] for number in range(4)]
    options = ServerDistillationConfig(
        output_dir="student",
        teacher_model_server_url=url,
        beta=beta,
        loss_top_k=1 if beta else 8,
        temperature=TEMPERATURE,
        max_completion_length=6,
        learning_rate=0.0,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = ServerDistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder),
        args=options,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
    )
    trainer.train()
    return list(trainer.state.log_history)


if __name__ == "__main__":
    folder, address = sys.argv[1:]
    found = ask(address)
    found["logs"] = {str(beta): train(folder, address, beta) for beta in (0.0, 1.0)}
    print("\n" + json.dumps(found))
