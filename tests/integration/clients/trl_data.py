"""What the program that runs TRL asks for, and its test compares."""

SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [7, 9]]
LENGTHS = [2, 1, 1]
TEMPERATURE = 1.7
