"""Writes the table of supported models into its page, from what the classes say of themselves."""

from __future__ import annotations

import re
from pathlib import Path

from vllm.model_report.families import markdown_table, native_families

PAGE = Path(__file__).with_name("supported_models.md")
_PLACE = re.compile(r"(<!-- made by [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str) -> str:
    """The page with the table as it has to be."""
    table = markdown_table(native_families())
    text, count = _PLACE.subn(lambda found: found[1] + table + found[2], page)
    assert count == 1, f"{PAGE} has no place for the table"
    return text


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
