"""An agent that adds with a tool. It asks the model at OPENAI_BASE_URL, and does not know that it is trained."""

import json
import os
import sys
import urllib.request

URL = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
NUMBER = {"type": "integer"}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}


def ask(messages):
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": ADD}]}
    request = urllib.request.Request(URL, json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def add(arguments):
    try:
        given = json.loads(arguments)
        return str(given["a"] + given["b"])
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(3):
    answer = ask(messages)
    messages.append(answer)
    if not answer.get("tool_calls"):
        break
    for call in answer["tool_calls"]:
        result = add(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(messages[-1]["content"])
