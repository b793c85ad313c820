"""Refuses conversations of which a chat template would leave something out."""

from __future__ import annotations

from vllm.transformers_utils.chat_messages import ChatMessage, content_text
from vllm.transformers_utils.chat_outline import Outline, Piece
from vllm.transformers_utils.chat_rendering import Located, Rendering

_OTHER_TEMPLATE = "or give a template that writes it (chat_template=, --chat-template)"


def check_kept(rendering: Rendering, messages: list[ChatMessage], text: str) -> Located | None:
    """Checks that ``text``, a rendering of ``messages``, has all that they say.

    Returns where it says it, or None where that is not certain. ValueError names the message and
    what is left out. Reasoning may be left out, since templates mean to do so.
    """
    marked = rendering.mark(messages)
    located = rendering.locate(marked, text)
    written = set() if located is None else set(located.outline.numbers)
    doubtful = {
        piece.message
        for number, piece in enumerate(marked.pieces)
        if piece.kind != "aside" and piece.text and number not in written
    }
    for position in sorted(doubtful):
        _check_message(rendering, messages, position, text)
    return located


def _check_message(
    rendering: Rendering, messages: list[ChatMessage], position: int, text: str
) -> None:
    """Puts markers into one message alone, and looks whether they come out."""
    marked = rendering.mark(messages, position)
    outline = rendering.outline(marked.messages, rendering.ends)
    for number, piece in enumerate(marked.pieces):
        if piece.kind == "aside" or not piece.text:
            continue
        if not _is_kept(number, marked.pieces, outline, text):
            what, advice = _describe(rendering, messages[position], piece)
            raise ValueError(
                f"message {position}: the chat template leaves out {what}: {advice}, "
                f"{_OTHER_TEMPLATE}"
            )


def _is_kept(number: int, pieces: list[Piece], outline: Outline | None, text: str) -> bool:
    said = pieces[number].text
    if outline is None:  # the template refuses the marker: the text itself is all there is to see
        return said in text
    if number in outline.numbers and outline.has_anything_in_place(text):
        return True
    others = (pieces[n].text for n in {*outline.numbers} - {number} if pieces[n].kind != "aside")
    elsewhere = (*outline.literals, *others)
    return text.count(said) > sum(one.count(said) for one in elsewhere)


def _describe(rendering: Rendering, message: ChatMessage, piece: Piece) -> tuple[str, str]:
    """What is left out, and what would work."""
    role, calls = message["role"], message.get("tool_calls", ())
    if piece.kind == "call":
        if piece.part:
            return f"tool call {piece.part + 1} of {len(calls)}", "give each call a message"
        if content_text(message).strip():
            return "tool calls beside a text", "leave the text out"
        return "tool calls", "write them into the text"
    if calls:
        return "a text beside tool calls", "leave the text out"
    form = rendering.forms.content_form(role)
    if form is not None and not form.is_read:
        return f"the text of messages of role {role!r}", "use a role that it knows"
    return (
        f"the text of this message of role {role!r} where it stands",
        "move it (some templates take a system message only first, and before a question)",
    )
