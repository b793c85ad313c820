"""Loads tokenizers, and uses them as the engine needs."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.utils.regular_files import check_files
from vllm.utils.text import message_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger(__name__)

_MODES = ("auto",)
_revisions: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
"""The version on the hub that was asked for, by tokenizer."""
_SETTINGS_FILES = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")


class TokenizerLike(Protocol):
    """The part of a transformers tokenizer that the engine uses."""

    is_fast: bool
    chat_template: Any
    bos_token_id: int | None
    eos_token_id: int | None
    all_special_ids: list[int]
    special_tokens_map: dict[str, Any]

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def get_chat_template(self, chat_template: str | None, tools: Any) -> str: ...


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **kwargs: Any,
) -> TokenizerLike:
    """Return the tokenizer of a local folder or hub id. ValueError or OSError: there is none.

    For a folder without tokenizer files, some families make a tokenizer without words. That counts
    as none.
    """
    if tokenizer_mode not in _MODES:
        raise ValueError(f"tokenizer_mode={tokenizer_mode!r}: has to be one of {', '.join(_MODES)}")
    from transformers import AutoTokenizer  # half a second that importing LLM can do without

    kwargs |= {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, **kwargs)
    except (OSError, ValueError, KeyError, ImportError):
        raise
    except Exception:  # of transformers' class for the config, which it reads to choose a class
        from vllm.transformers_utils.config import load_hf_config

        config = load_hf_config(
            tokenizer_name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            hf_token=kwargs.get("token"),
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, config=config, **kwargs)
        except (OSError, ValueError, KeyError, ImportError):
            raise
        except Exception as error:  # of slow tokenizers that take their files as given
            raise ValueError(f"{type(error).__name__}: {error}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"{tokenizer_name!r} holds no tokenizer files")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(tokenizer_name, revision, kwargs.get("token"))
    _revisions[tokenizer] = revision
    return cast(TokenizerLike, tokenizer)


_PROCESSOR_FILES = ("chat_template.json", "processor_config.json")


def _processor_template(
    name: str, revision: str | None, token: bool | str | None
) -> str | dict[str, str] | None:
    """Return the processor's chat template, which older releases of transformers save as JSON."""
    from transformers.utils import cached_file

    for file_name in _PROCESSOR_FILES:
        try:
            path = cached_file(
                name,
                file_name,
                revision=revision,
                token=token,
                _raise_exceptions_for_missing_entries=False,
            )
            stated = json.loads(Path(path).read_text(encoding="utf-8")) if path else None
            template = stated.get("chat_template") if isinstance(stated, dict) else None
            if isinstance(template, list):
                template = {one["name"]: one["template"] for one in template}
            if isinstance(template, str | dict) and template:
                return template
        except OSError:  # it is not there
            continue
        except (ValueError, LookupError, TypeError) as error:
            logger.warning(
                "%s of %s has no chat template that can be read: %s: %s",
                *(file_name, name, type(error).__name__, message_of(error)),
            )
    return None


def load_tokenizer(model_config: ModelConfig) -> tuple[TokenizerLike | None, str]:
    """Return the model's tokenizer, or None and the reason why text prompts are not possible."""
    if model_config.skip_tokenizer_init:
        return None, "skip_tokenizer_init=True"
    name, is_named = model_config.tokenizer, model_config.tokenizer_revision is not None
    revision = model_config.tokenizer_revision
    if name == model_config.model and not is_named:
        revision = model_config.revision
    try:
        check_files(Path(name))
        tokenizer = get_tokenizer(
            name,
            tokenizer_mode=model_config.tokenizer_mode,
            trust_remote_code=model_config.trust_remote_code,
            revision=revision,
            token=model_config.hf_token,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        place = repr(name) + (f", revision={revision!r}" if revision else "")
        reason = f"no tokenizer could be loaded from {place}: {_brief(error)}"
        if name != model_config.model or is_named:
            raise ValueError(reason) from error
        logger.warning("%s. Prompts have to be token ids, and outputs carry no text.", reason)
        return None, reason
    return tokenizer, ""


def _brief(error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return first_line.rstrip(" .:") or type(error).__name__


def has_second_bos(tokenizer: TokenizerLike, token_ids: Sequence[int]) -> bool:
    """Return whether the tokens of a text begin with two BOS tokens, which is warned of once: the
    text begins with one, and the tokenizer added another."""
    bos = tokenizer.bos_token_id
    found = bos is not None and list(token_ids[:2]) == [bos, bos]
    if found:
        logger.warning_once(
            "A text begins with the BOS token, and the tokenizer adds another one: leave it out of "
            "the text, or extract with add_special_tokens=False (--no-add-special-tokens)"
        )
    return found


_USUAL_CHARACTERS = 32
"""Characters per token that nearly no text exceeds. Longer texts are examined."""
_COMPOSED = 4
"""The largest number of characters that a normaliser turns into one."""


def is_certainly_longer(tokenizer: TokenizerLike, text: str, num_tokens: int) -> bool:
    """Return whether ``text`` certainly has more than ``num_tokens``, without tokenising it.

    True only for tokenizers that keep every byte, so that a token stands for no more than the
    longest word of their vocabulary. Texts of usual length cost nothing.
    """
    if len(text) <= _USUAL_CHARACTERS * num_tokens:
        return False
    longest = _longest_word(tokenizer)
    return longest is not None and len(text) > _COMPOSED * longest * num_tokens


def start_of(tokenizer: TokenizerLike, text: str, num_tokens: int) -> str:
    """Return the start of ``text`` that its first tokens can depend on. Unknown: the whole text.

    It is twice the text that those tokens can hold, so that words end long before the cut.
    """
    if not is_certainly_longer(tokenizer, text, 2 * num_tokens):
        return text
    return text[: 2 * _COMPOSED * (_longest_word(tokenizer) or 0) * num_tokens]


_KEEPING = (
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace", "Digits"),
    *("Punctuation", "Split", "UnicodeScripts", "FixedLength"),
)
"""Normalisers and pre-tokenizers that leave out no character."""
_longest_words: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()


def _longest_word(tokenizer: Any) -> int | None:
    """Return the characters of the longest word. None: a token may stand for any number."""
    if tokenizer in _longest_words:
        return _longest_words[tokenizer]
    longest = None
    if tokenizer.is_fast:
        stated = json.loads(tokenizer.backend_tokenizer.to_str())
        model = stated["model"]
        keeps_bytes = model["type"] in ("BPE", "Unigram") and (
            model.get("byte_fallback") or "ByteLevel" in json.dumps(stated["pre_tokenizer"])
        )
        swallows = any(one["lstrip"] or one["rstrip"] for one in stated["added_tokens"])
        steps = (stated["normalizer"], stated["pre_tokenizer"])
        if keeps_bytes and not swallows and all(map(_keeps_characters, steps)):
            longest = max(map(len, tokenizer.get_vocab()))
    _longest_words[tokenizer] = longest
    return longest


def _keeps_characters(step: dict[str, Any] | None) -> bool:
    """Return whether a normaliser or a pre-tokenizer leaves out no character. Some leave out all
    white space, which a text may have any length of."""
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(_keeps_characters, step.get("normalizers") or step["pretokenizers"]))
    if step["type"] == "Replace":
        text = step["pattern"].get("String")
        return text is not None and len(step["content"]) >= len(text)
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def make_decoder(
    tokenizer: TokenizerLike,
    *,
    skip_special_tokens: bool = False,
    spaces_between_special_tokens: bool = True,
) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text. Unknown ids give no text."""
    # Slow tokenizers fail on ids beyond their vocabulary, which models may produce.
    id_limit = None if tokenizer.is_fast else len(tokenizer)

    def decode(token_ids: Sequence[int]) -> str:
        if id_limit is not None:
            token_ids = [token for token in token_ids if token < id_limit]
        return tokenizer.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    if skip_special_tokens or spaces_between_special_tokens:
        return decode
    special_ids = frozenset(tokenizer.all_special_ids)

    def decode_without_spaces(token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        run: list[int] = []
        for token in token_ids:
            if token in special_ids:
                pieces += [decode(run), decode([token])]
                run = []
            else:
                run.append(token)
        return "".join([*pieces, decode(run)])

    return decode_without_spaces


def stated_in_full(tokenizer: Any) -> str:
    """Return a text that differs if texts may have other tokens, or chats another rendering."""
    known: object
    if tokenizer.is_fast:
        known = tokenizer.backend_tokenizer.to_str()
    else:  # Qwen's first tokenizer has words of bytes, which JSON does not take as keys
        known = {str(word): number for word, number in tokenizer.get_vocab().items()}
    # Templates write special tokens by their roles, which tokenizer_config.json states.
    roles = tokenizer.special_tokens_map
    splits = tokenizer.split_special_tokens
    stated = [known, tokenizer.chat_template, roles, splits]
    code = _own_code(type(tokenizer))
    if code or not tokenizer.is_fast:
        stated += [code, _digests_of_files(tokenizer)]
    return json.dumps(stated, sort_keys=True, default=str)


def _own_code(tokenizer_class: type) -> dict[str, str]:
    """Digests of the code of a tokenizer that is not of transformers, by the files' names."""
    files: set[Path] = set()
    for one in tokenizer_class.__mro__:
        package = one.__module__.partition(".")[0]
        if package not in ("builtins", "transformers"):
            # What comes with a checkpoint has helpers beside it.
            file = Path(inspect.getfile(one))
            files |= set(file.parent.glob("*.py")) if package == "transformers_modules" else {file}
    return {path.name: _digest_of(path) for path in files}


def _digests_of_files(tokenizer: Any) -> dict[str, str]:
    """Digests of the files that a tokenizer was made of, by name; those that are not there have
    none."""
    from transformers.utils import cached_file

    found: dict[str, str] = {}
    revision = _revisions.get(tokenizer)
    for name in sorted({*_SETTINGS_FILES, *tokenizer.vocab_files_names.values()}):
        with suppress(OSError, ValueError):
            path = cached_file(tokenizer.name_or_path, name, revision=revision)
            found[name] = _digest_of(Path(path))
    return found


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
