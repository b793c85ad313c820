"""``vllm extract``: a dataset of hidden states from files of prompts."""
