"""The tokens between the turns of an episode, by the model's own chat template, and the calls in responses.

Knows no engine. Sampled tokens are never rendered again. The tokens that follow a response, up to where the next one
begins, are the difference that the template makes when observations are added to a short synthetic chat. A rehearsal
proves once per kind of turn that this difference is the one that it makes in long chats too, and that it leaves the
history as it was; where that does not hold, such as in templates that drop old thoughts, there is no suffix and a new
row begins.

`read_calls` is the other direction: the calls of tools in the text that a model wrote, by the format of its family.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, assert_never, cast

import numpy as np

from megarl.config.environment import CallFormat
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.protocol import Call, ChatMessage, Malformed, Observation
from megarl.errors import DataError
from megarl.system.foreign import read_json
from megarl.types import JsonValue, TokenArray

_NUM_REHEARSED = 5
_ASKED: ChatMessage = {"role": "user", "content": "How many?"}
_MAX_OPENINGS, _MAX_KEPT_TOKENS = 256, 8192
"""Beginnings of conversations that are kept, and their longest: 8 MiB at most."""
_THOUGHT_END = "</think>"
_THOUGHT = f"<think>\nI count them.\n{_THOUGHT_END}\n\n"
_CUT = "\n[cut here: {num_cut} of {num_tokens} tokens are not shown]"
_CHARACTERS_PER_TOKEN = 64
"""Longer texts are cut by characters first: to count the tokens of a flood takes longer than the flood is worth."""
WrittenFormat: TypeAlias = Literal["hermes", "llama"]
_BEGIN = "<tool_call>"
_END = "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_A_CALL = re.compile(r'^\{\s*"(name|type|function|parameters|arguments)"\s*:')
_MAX_CALLS = 64
"""A response with more calls is not read: they would take longer than an episode may."""
_MAX_NAME_CHARACTERS = 100
_MAX_CALL_CHARACTERS = 1_000_000
"""A longer call is not read: parsing deeply nested text takes time and stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnKind:
    """All that a suffix may depend on besides the contents of observations."""

    roles: tuple[str, ...]
    has_thought: bool


class Dialogue:
    """Tokens and texts of the episodes of a run, whose tools are those of the tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_result_tokens: int,
        call_format: CallFormat = "auto",
        text_field: str | None = None,
    ) -> None:
        """With `text_field`, every response is a call of the tool `step` with its text in that argument."""
        self._tokenizer = tokenizer
        self._max_result_tokens = max_result_tokens
        self._call_format = call_format
        self._text_field = text_field
        self._proofs: dict[_TurnKind, bool] = {}
        self._openings: OrderedDict[bytes, TokenArray] = OrderedDict()

    async def prompt_ids(self, messages: Sequence[ChatMessage]) -> TokenArray:
        """Return the tokens up to where the assistant begins to answer."""
        return await self._tokenizer.encode_aside(self._tokenizer.render_chat(messages))

    whole = prompt_ids
    """The history of a row that begins in the middle of an episode, where responses are messages."""

    async def first(self, key: bytes, messages: Callable[[], Sequence[ChatMessage]]) -> TokenArray:
        """Return `prompt_ids` of the messages that `key` names; the episodes of a group begin with the same ones."""
        token_ids = self._openings.get(key)
        if token_ids is None:
            token_ids = await self.prompt_ids(messages())
            if len(token_ids) <= _MAX_KEPT_TOKENS:
                self._openings[key] = token_ids
                token_ids.flags.writeable = False
        if len(self._openings) > _MAX_OPENINGS:
            self._openings.popitem(last=False)
        return token_ids

    async def suffix(self, sampled_ids: TokenArray, observations: Sequence[ChatMessage]) -> TokenArray | None:
        """Return the tokens from the end of a response to the beginning of the next; None where none can be proved."""
        tokenizer = self._tokenizer
        has_thought = _THOUGHT_END in tokenizer.decode(sampled_ids)
        kind = _TurnKind(roles=tuple(str(message["role"]) for message in observations), has_thought=has_thought)
        if kind not in self._proofs:
            self._proofs[kind] = self._is_proved(kind)
        if not self._proofs[kind]:
            return None
        text = self._short_difference(observations)
        assert text is not None, f"a rehearsed difference is gone: {kind}"
        token_ids = await tokenizer.encode_aside(text)
        has_end = len(sampled_ids) > 0 and int(sampled_ids[-1]) in tokenizer.eos_ids
        return token_ids if has_end else np.concatenate([np.array([self._end_id], np.int32), token_ids])

    def calls(self, text: str) -> list[Call] | Malformed:
        """Return the calls of a response; none for an answer."""
        if self._text_field is not None:
            return [Call(name="step", arguments={self._text_field: text}, id="call_0")]
        return read_calls(text, self.call_format)

    async def observation(self, call: Call, observation: Observation) -> ChatMessage:
        """Return the message of a tool's answer, cut to its limit and plain text."""
        return self._message(call, await self.cut(observation.text))

    async def opening(self, text: str) -> ChatMessage:
        """Return the message with which an environment begins, cut and plain as an answer of it."""
        return {"role": "user", "content": await self.cut(text)}

    async def complaint(self, malformed: Malformed) -> ChatMessage:
        """Return the message that tells the model that its call could not be read."""
        text = await self.cut(f"error: the call could not be read: {malformed.why}")
        return {"role": "tool", "name": "error", "tool_call_id": "call_0", "content": text}

    def _message(self, call: Call, text: str) -> ChatMessage:
        if self._text_field is not None:
            return {"role": "user", "content": text}
        name = self._tokenizer.plain(call.name[:_MAX_NAME_CHARACTERS])
        return {"role": "tool", "name": name, "tool_call_id": call.id, "content": text}

    async def cut(self, text: str) -> str:
        """Return foreign text as plain text of at most `max_result_tokens` tokens besides a mark."""
        limit, plain = self._max_result_tokens, self._tokenizer.plain
        known = text[: limit * _CHARACTERS_PER_TOKEN]
        shown = plain(known)
        if shown.isascii() and len(shown) < limit:  # no tokenizer makes two tokens of one such character
            return shown
        token_ids = await self._tokenizer.encode_aside(shown)
        # The tokens of the part that was not counted are estimated from those that were.
        num_tokens = len(token_ids) * len(text) // max(len(known), 1)
        if num_tokens <= limit:
            return shown
        kept = plain(self._tokenizer.decode(token_ids[:limit]).rstrip("\ufffd"))
        return kept + _CUT.format(num_cut=num_tokens - limit, num_tokens=num_tokens)

    @cached_property
    def call_format(self) -> WrittenFormat:
        """The format in which this model writes calls; a DataError if the template does not tell."""
        if self._call_format != "auto":
            return self._call_format
        arguments: dict[str, JsonValue] = {"count": 3}
        function: dict[str, JsonValue] = {"name": "rehearsed_tool", "arguments": arguments}
        called: ChatMessage = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "call_0", "function": function}],
        }
        result: ChatMessage = {"role": "tool", "name": "rehearsed_tool", "tool_call_id": "call_0", "content": "3"}
        before = self._tokenizer.render_chat([_ASKED])
        rendered = self._tokenizer.render_chat([_ASKED, called, result]).removeprefix(before)
        found = written_format(rendered) if "rehearsed_tool" in rendered else None
        if found is None:
            raise DataError(
                "the chat template writes calls of tools in no known form; set environment.call_format to the one that "
                "the model was trained with"
            )
        return found

    def refusals(self) -> list[str]:
        """Return the reasons for which the template cannot be used with tools, one line each."""
        tokenizer = self._tokenizer
        if tokenizer.template == "raw":
            return ["data.template raw renders no tools and no observations; use the model's chat template"]
        try:
            rendered = tokenizer.render_chat([_ASKED])
            names = [str(tool["function"]["name"]) for tool in tokenizer.tools if isinstance(tool["function"], dict)]
            missing = [name for name in names if name not in rendered]
            if missing and self._text_field is None:
                return [f"the chat template does not render tools: {', '.join(missing)} is not in the prompt"]
            if self._text_field is None:
                self.call_format  # noqa: B018 - raises where it is not known
            role = "tool" if self._text_field is None else "user"
            tokenizer.render_chat([_ASKED, {"role": "assistant", "content": "Three."}, _observed(role, 0)])
        except DataError as error:
            return [str(error)]
        return []

    def rehearsal(self) -> str:
        """Rehearse five synthetic turns; return one line that says whether the history only grows."""
        roles = ("tool",) if self._text_field is None else ("user",)
        plain, thoughtful = (self._is_proved(_TurnKind(roles=roles, has_thought=thought)) for thought in (False, True))
        if plain and thoughtful:
            return f"{_NUM_REHEARSED} synthetic turns: history is append-only, with thoughts and without"
        if plain:
            return (
                f"{_NUM_REHEARSED} synthetic turns: history is append-only without thoughts; "
                "the template drops old thoughts, so that a new row begins after each turn with one"
            )
        return f"{_NUM_REHEARSED} synthetic turns: the template rewrites its history, a new row begins after each turn"

    def least_tokens(self, num_turns: int) -> int:
        """Return how many tokens an episode of so many turns has at least: responses and results of one token."""
        observed = self._message(Call(name="count", arguments={}, id="call_0"), "3")
        between = self._short_difference([observed])
        if between is None:
            return num_turns
        (token_ids,) = self._tokenizer.encode([between])
        return num_turns + (num_turns - 1) * len(token_ids)

    @cached_property
    def _short(self) -> str:
        return self._tokenizer.render_chat([_ASKED])

    @cached_property
    def _end_id(self) -> int:
        """The end token that the template writes after a response."""
        before = self._short + "Three."
        whole = self._tokenizer.render_chat([_ASKED, {"role": "assistant", "content": "Three."}, _ASKED])
        found = [token_id for text, token_id in self._tokenizer.eos_texts.items() if whole.startswith(before + text)]
        return found[0] if found else self._tokenizer.eos_ids[0]

    def _short_difference(self, observed: Sequence[ChatMessage]) -> str | None:
        """Return the difference in a chat of one turn."""
        return self._after(self._short, [_ASKED], "Three.", observed)

    def _after(
        self, rendered: str, chat: Sequence[ChatMessage], answer: str, observed: Sequence[ChatMessage]
    ) -> str | None:
        """Return the text between the end token of an answer and the next answer; None if the history changes."""
        whole = self._tokenizer.render_chat([*chat, {"role": "assistant", "content": answer}, *observed])
        for end in self._tokenizer.eos_texts:
            if whole.startswith(rendered + answer + end):
                return whole.removeprefix(rendered + answer + end)
        return None

    def _is_proved(self, kind: _TurnKind) -> bool:
        """Whether, in chats of up to five turns, the history stays and the suffix is that of a chat of one turn."""
        try:
            return self._rehearse(kind)
        except DataError:
            return False

    def _rehearse(self, kind: _TurnKind) -> bool:
        tokenizer = self._tokenizer
        chat: list[ChatMessage] = [_ASKED]
        for turn in range(_NUM_REHEARSED):
            # Every third turn is without a thought: the kinds mix in an episode.
            answer = (_THOUGHT if kind.has_thought and turn % 3 < 2 else "") + f"I look at {turn}."
            observed = [_observed(role, 10 * turn + place) for place, role in enumerate(kind.roles)]
            suffix = self._after(tokenizer.render_chat(chat), chat, answer, observed)
            if suffix is None or suffix != self._short_difference(observed):
                return False
            chat += [{"role": "assistant", "content": answer}, *observed]
            whole = tokenizer.render_chat(chat)
            history = whole.removesuffix(suffix)
            # The same in tokens: a tokenizer may see the beginning of a text differently from its middle.
            whole_ids, history_ids, suffix_ids = tokenizer.encode([whole, history, suffix])
            if not np.array_equal(whole_ids, np.concatenate([history_ids, suffix_ids])):
                return False
        return True


def _observed(role: str, number: int) -> ChatMessage:
    text = f"There are {number}."
    if role == "tool":
        return {"role": role, "name": "count", "tool_call_id": "call_0", "content": text}
    return {"role": role, "content": text}


def read_calls(text: str, call_format: WrittenFormat) -> list[Call] | Malformed:
    """Return the calls in their order, none for an answer. Text inside a thought is not a call."""
    said = text.rpartition(_THOUGHT_END)[2]
    match call_format:
        case "hermes":
            return _tagged_calls(said)
        case "llama":
            return _plain_call(said)
        case _:
            assert_never(call_format)


def text_before_calls(text: str, call_format: WrittenFormat) -> str:
    """Return the text of a response without its calls; for one that is not complete, what cannot become one."""
    match call_format:
        case "hermes":
            before, begin, _ = text.partition(_BEGIN)
            if not begin:
                held = next((size for size in range(len(_BEGIN) - 1, 0, -1) if text.endswith(_BEGIN[:size])), 0)
                before = text[: len(text) - held]
            return before.rstrip()
        case "llama":
            body = text.lstrip()
            return "" if body.startswith("{") or _PYTHON_TAG.startswith(body[: len(_PYTHON_TAG)]) else text.rstrip()
        case _:
            assert_never(call_format)


def written_format(rendered: str) -> WrittenFormat | None:
    """Return the format of a call that a template has rendered; None for one that is not known."""
    if _BEGIN in rendered and _END in rendered:
        return "hermes"
    return "llama" if '"parameters"' in rendered else None


def _tagged_calls(text: str) -> list[Call] | Malformed:
    before, *pieces = text.split(_BEGIN)
    # In linear time, unlike a pattern with both tags: a model may write a tag ten thousand times.
    parts = [piece.partition(_END) for piece in pieces]
    if _END in before or any(not end or _END in rest for _, end, rest in parts):
        return Malformed(text=text, why=f"{_BEGIN} and {_END} do not pair up")
    if len(parts) > _MAX_CALLS:
        return Malformed(text=text, why=f"there are {len(parts)} calls in one response; at most {_MAX_CALLS} are run")
    calls = [_read(body.strip(), place, "arguments") for place, (body, _, _) in enumerate(parts)]
    problem = next((call for call in calls if isinstance(call, Malformed)), None)
    return problem or [call for call in calls if isinstance(call, Call)]


def _plain_call(text: str) -> list[Call] | Malformed:
    body = text.strip()
    is_tagged = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not is_tagged and not _LOOKS_LIKE_A_CALL.match(body):
        return []
    call = _read(body, 0, "parameters")
    return call if isinstance(call, Malformed) else [call]


def _read(body: str, place: int, arguments_key: str) -> Call | Malformed:
    """Read one call; `parameters` and `arguments` are both understood, as models mix them up."""
    if len(body) > _MAX_CALL_CHARACTERS:
        return Malformed(text=body[:1000], why=f"it has more than {_MAX_CALL_CHARACTERS} characters")
    try:
        # Arguments that cannot be sent on as JSON are the model's fault; found later they would be the tool's.
        value = cast("JsonValue", read_json(body))
    except ValueError as error:
        return Malformed(text=body, why=f"it is not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed(text=body, why="it is not an object with a name")
    other = "arguments" if arguments_key == "parameters" else "parameters"
    arguments = value.get(arguments_key, value.get(other, {}))
    if not isinstance(arguments, dict):
        return Malformed(text=body, why=f"its {arguments_key} are not an object")
    return Call(name=str(value["name"]), arguments=arguments, id=f"call_{place}")
