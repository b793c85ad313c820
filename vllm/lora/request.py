"""LoRARequest: the adapter of a request, as upstream spells it."""

from __future__ import annotations

from typing import NoReturn

import msgspec

from vllm.exceptions import VLLMValidationError
from vllm.utils.text import brief, check_text


class LoRARequest(msgspec.Struct, frozen=True):
    """Names an adapter: requests with equal names, numbers and paths use the same one.

    ValueError: a value cannot be used.
    """

    lora_name: str
    lora_int_id: int
    """A number from 1 on."""
    lora_path: str
    """Folder that PEFT wrote: adapter_config.json, and adapter_model.safetensors or .bin."""

    def __post_init__(self) -> None:
        number: object = self.lora_int_id
        for name in ("lora_name", "lora_path"):
            value: object = getattr(self, name)
            if not isinstance(value, str) or not value:
                _fail(name, value, "a string that is not empty")
            check_text(name, value)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 2**63:
            _fail("lora_int_id", number, "a whole number from 1 on")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


def check_lora_request(value: object, *, is_enabled: bool) -> LoRARequest | None:
    """Return the adapter of a request. ValueError: it is something else, or adapters are off."""
    if value is None:
        return None
    if not isinstance(value, LoRARequest):
        _fail("lora_request", value, "a vllm.lora.request.LoRARequest")
    if not is_enabled:
        raise VLLMValidationError(
            f"lora_request={brief(value.lora_name)}: this engine was started without "
            "enable_lora=True (--enable-lora)",
            parameter="lora_request",
        )
    return value


def _fail(name: str, value: object, expected: str) -> NoReturn:
    raise VLLMValidationError(f"{name}={brief(value)}: has to be {expected}", parameter=name)
