"""Prompts and settings that the program that runs TRL shares with its test."""

SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [7, 9]]
LENGTHS = [2, 1, 1]
TEMPERATURE = 1.7
