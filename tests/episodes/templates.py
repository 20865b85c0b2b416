"""Chat templates in the manner of three model families, with tokenizers that have their special tokens.

The families differ in what matters for a history of tokens: how tools, calls and results are written, and what becomes
of thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.episodes.protocol import ToolSchema
from megarl.types import Prompt

ADD = ToolSchema(
    name="add",
    description="Add two numbers.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)

_QWEN_SYSTEM = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
# Tools

You may call functions. Their signatures are within <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

Write each call as JSON within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
"""

_QWEN_CALLS = """\
{%- for call in message.tool_calls or [] %}
        {%- set call = call.function if call.function else call %}
        {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
        {{- (call.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}"""

_QWEN_RESULTS = """\
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}"""


def _qwen(answer: str, *, before: str = "") -> str:
    """Return a template of Qwen's; `answer` renders the text of an assistant's message."""
    return f"""\
{_QWEN_SYSTEM}{before}{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}
        {{{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
{answer}
    {_QWEN_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'tool' %}}
{_QWEN_RESULTS}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{% endif %}}"""


QWEN2_5 = _qwen("        {{- '<|im_start|>assistant\\n' + (message.content or '') }}")

# Thoughts stay after the last message of a user and are dropped before it.
QWEN3 = _qwen(
    """\
        {%- set content = message.content or '' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- content }}
        {%- endif %}""",
    before="""\
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
""",
)

# Results are JSON strings of a role of their own; a call is the whole message.
LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.index0 == 0 and tools %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\nThese functions can be called, as JSON ' }}
        {{- '{"name": function name, "parameters": arguments}:\\n\\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# Every thought of the past is dropped, and the beginning of one is part of the generation prompt.
FORGETFUL = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }} <tool_call>{"name": ...}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HEADERS = ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>")
FAMILIES = {
    "llama": (LLAMA, _HEADERS, ("<|eot_id|>", "<|eom_id|>")),
    "qwen2.5": (QWEN2_5, _CHATML, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": (QWEN3, _CHATML, ("<|im_end|>", "<|endoftext|>")),
    "forgetful": (FORGETFUL, _CHATML, ("<|im_end|>",)),
}
_PLAIN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special, as Qwen has them."""


def write_tokenizer(folder: Path, family: str, *, template: str | None = None, added: Sequence[str] = ()) -> int:
    """Write the tokenizer's files of a family; return the size of its vocabulary. `added` texts are single tokens."""
    own, special, ends = FAMILIES[family]
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = [
        "the sum of two numbers is three\n\n",
        '{"name": "add", "arguments": {"a": 12, "b": 34}}\n',
        "There are 7.",
    ]
    raw.train_from_iterator(words * 3, trainer)
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    raw.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*_PLAIN_ADDED, *added)])
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": own if template is None else template,
        "eos_token": ends[0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [raw.token_to_id(token) for token in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return int(raw.get_vocab_size())


def family_tokenizer(
    folder: Path, family: str, *, tools: Sequence[ToolSchema] = (ADD,), template: str | None = None
) -> Tokenizer:
    vocab = write_tokenizer(folder, family, template=template)
    return load_tokenizer(folder, vocab=vocab, tools=[tool.as_function for tool in tools])


def sum_prompt(tokenizer: Tokenizer) -> Prompt:
    """Return the prompt of a sum, as rows of data become prompts."""
    messages = ({"role": "user", "content": "3+4="},)
    (token_ids,) = tokenizer.encode([tokenizer.render_chat(messages)])
    return Prompt(
        uid="row-0",
        position=0,
        epoch=0,
        token_ids=token_ids,
        data_source="",
        ground_truth="7",
        extra_info={},
        messages=messages,
    )
