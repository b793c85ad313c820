"""Measurements of the engine on this machine: what ``vllm bench`` runs."""
