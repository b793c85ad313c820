"""``vllm extract``: make a dataset of hidden states from files of prompts."""
