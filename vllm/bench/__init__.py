"""Measurements of the engine on this machine, which ``vllm bench`` runs."""
