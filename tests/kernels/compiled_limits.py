"""Limits of what a compiled kernel may cost, measured on today's forms of each.

``compile_kernels.py`` prints the costs that are compared with them. Sizes of tiles are chosen for
compute capability 90; on others programs only have to fit.
"""

from __future__ import annotations

from typing import Any

SHARED_BYTES = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
"""Most shared bytes of one program, by compute capability."""
LEAST_INSTRUCTIONS = 40
"""Triton compiles what a card cannot do to a trap of one instruction, without a word."""
MOST_BARRIERS_IN_LOOPS = {"scan_kernel": 11, "prepare_kernel": 37, "step_kernel": 4}
MOST_NARROW_LOADS = {
    "_attention_kernel": 52,
    "_bad_cells_kernel": 0,
    "_capture_kernel": 1,
    "_combine_kernel": 36,
    "_conv_kernel": 25,
    "_copy_kernel": 2,
    "_delta_kernel": 14,
    "_expert_kernel": 8,
    "_gate_kernel": 2,
    "_head_scan_kernel": 16,
    "_mlstm_gates_kernel": 15,
    "_mlstm_memory_kernel": 15,
    "_norm_rotary_kernel": 29,
    "_recurrence_kernel": 14,
    "_rms_norm_kernel": 1,
    "_rotary_kernel": 25,
    "_scan_kernel": 16,
    "_wkv_kernel": 17,
    "_write_kv_kernel": 3,
    "prepare_kernel": 19,
    "scan_kernel": 54,
    "step_kernel": 22,
}
"""Instructions that read fewer than 16 bytes of a thread: a step's metadata, numbers of a row or
of a head, and rows of sizes or beginnings that are no multiples of 16 bytes. The most of Triton 3.6
and 3.7 (of ``scan_kernel`` 54 and 26)."""
WITHOUT_WIDE_LOADS = {
    "_combine_kernel",
    "_conv_kernel",
    "_gate_kernel",
    "_mlstm_gates_kernel",
    "_recurrence_kernel",
    "_rotary_kernel",
    "_wkv_kernel",
    "_write_kv_kernel",
}
"""Some of their forms have too little for each thread, or heads of 40 elements."""
LEAST_PROGRAMS = {
    "_attention_kernel": 1,
    "_conv_kernel": 3,
    "_delta_kernel": 4,
    "_expert_kernel": 3,
    "_head_scan_kernel": 5,
    "_mlstm_memory_kernel": 3,
    "_norm_rotary_kernel": 6,
    "_rms_norm_kernel": 3,
    "_scan_kernel": 5,
    "prepare_kernel": 2,
    "scan_kernel": 1,
    "step_kernel": 9,
}
"""Fewest programs that a multiprocessor has to hold at once; eight for other kernels."""
LEAST_PROGRAMS_BY_3_6 = {**LEAST_PROGRAMS, "_norm_rotary_kernel": 5}


def faults(form: dict[str, Any], capability: int) -> list[str]:
    """List what is wrong with a form: nothing, or each cost with its limit."""
    found = []
    if form["shared"] > SHARED_BYTES[capability]:
        found.append(f"{form['shared']} bytes of shared memory")
    if form["instructions"] < LEAST_INSTRUCTIONS:
        found.append("is a trap")
    found += [f"loses the {kind} of a loop" for kind in form["lost_values"]]
    found += [f"overwrites {register} early" for register in form["overwritten_operands"]]
    return found + (_costs(form) if capability == 90 else [])


def _costs(form: dict[str, Any]) -> list[str]:
    kernel = form["kernel"]
    programs = LEAST_PROGRAMS_BY_3_6 if form["triton"].startswith("3.6.") else LEAST_PROGRAMS
    most = {
        "spills_in_loops": 0,
        "reloads_in_loops": 1,
        "barriers_in_loops": MOST_BARRIERS_IN_LOOPS.get(kernel, 99),
        "narrow_loads": MOST_NARROW_LOADS[kernel],
    }
    least = {
        "programs_at_once": programs.get(kernel, 8),
        "wide_loads": 0 if kernel in WITHOUT_WIDE_LOADS else 1,
    }
    found = [f"{form[what]} {what}, at most {n}" for what, n in most.items() if form[what] > n]
    found += [f"{form[what]} {what}, at least {n}" for what, n in least.items() if form[what] < n]
    multiplies = kernel in ("_attention_kernel", "scan_kernel")
    if multiplies and "*fp32" not in form["form"].split()[0]:
        multiplied = any("HGMMA" in loop for loop in form["arithmetic_of_loops"])
        found += [] if multiplied else ["no HGMMA"]
    return found
