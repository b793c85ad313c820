"""Looks for what a compiler made wrong of a kernel: results, not costs.

Both kinds were found on a card, where rows were wrong, while the interpreter, which does not
compile, gave the right ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

_LOOP = re.compile(r"scf\.for\b.*iter_args\(.*?\) -> \((.*)\)\s*:")
_SCALAR = re.compile(r"^(?:[if]\d+|!tt\.ptr<.*>)$")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_REGISTER = re.compile(r"%[a-z]+\d+")


def lost_values(before: str, after: str) -> list[str]:
    """Kinds of scalars that loops carry before the layout of tensors is chosen, and not after.

    Triton 3.6 and 3.7 put the first value in the place of an integer that bounds an inner loop.
    before, after: the listings "ttir" and "ttgir" of one kernel.
    """
    loops, later = list(_carried(before)), list(_carried(after))
    if len(loops) != len(later):
        return [f"{len(loops)} loops became {len(later)}"]
    return sorted(
        kind for own, kept in zip(loops, later, strict=True) for kind in (own - kept).elements()
    )


def _carried(listing: str) -> Iterator[Counter[str]]:
    """Kinds of the scalars that each loop carries, in the order of loops."""
    for line in listing.splitlines():
        if "scf.for" not in line:
            continue
        found = _LOOP.search(re.sub(r"\s+loc\(.*", "", line))
        kinds = re.split(r", (?![^<]*>)", found[1]) if found else []
        yield Counter(kind for kind in kinds if _SCALAR.match(kind))


def overwritten_operands(ptx: str) -> list[str]:
    """Registers that are written while a product that reads them may still run.

    A product of Hopper's tensor cores reads its left factor from registers until it is waited for,
    also when that is in the next turn of a loop.
    """
    blocks = _blocks(ptx)
    running: dict[str, frozenset[str]] = dict.fromkeys(blocks, frozenset())
    found: set[str] = set()
    todo = list(blocks)
    while todo:
        name = todo.pop()
        lines, following = blocks[name]
        busy = set(running[name])
        for line in lines:
            if "wgmma.wait_group" in line:
                busy.clear()
            elif "wgmma.mma_async" in line:
                busy |= set(_left_factor(line))
            else:
                found |= busy & set(_written(line))
        for one in following:
            if not busy <= running[one]:
                running[one] |= busy
                todo.append(one)
    return sorted(found)


def _blocks(ptx: str) -> dict[str, tuple[list[str], list[str]]]:
    """Name of each basic block -> its instructions, and the blocks that may follow."""
    blocks: dict[str, tuple[list[str], list[str]]] = {"begin": ([], [])}
    name, goes_on = "begin", True
    for line in ptx.splitlines():
        text = line.strip()
        label = re.match(r"(\$\w+):", text)
        branch = _BRANCH.search(text)
        if label and not label[1].startswith("$L__tmp"):
            if goes_on:
                blocks[name][1].append(label[1])
            name, goes_on = label[1], True
            blocks[name] = ([], [])
        elif branch:
            blocks[name][1].append(branch[1])
            goes_on = text.startswith("@")
            if not goes_on:  # what follows has no name and cannot be reached
                name, goes_on = f"after {len(blocks)}", False
                blocks[name] = ([], [])
            else:  # the block ends here: a branch later in it has other products running
                rest = f"after {len(blocks)}"
                blocks[name][1].append(rest)
                name = rest
                blocks[name] = ([], [])
        elif text and not text.startswith(("//", ".")):
            blocks[name][0].append(text)
    return blocks


def _left_factor(line: str) -> list[str]:
    """Registers of a product's left factor; none where it is in shared memory."""
    groups = re.findall(r"\{([^}]*)\}", line)
    return _REGISTER.findall(groups[1]) if len(groups) > 1 else []


def _written(line: str) -> list[str]:
    """Registers that an instruction writes, which come first."""
    text = re.sub(r"^@!?%\w+\s+", "", line)
    if text.startswith(("st.", "red.", "setp", "cp.", "bar", "fence", "wgmma")):
        return []
    parts = text.split(None, 1)
    if len(parts) < 2:
        return []
    operands = parts[1].strip()
    first = operands[1 : operands.index("}")] if operands.startswith("{") else operands
    registers = _REGISTER.findall(first)
    return registers if operands.startswith("{") else registers[:1]
