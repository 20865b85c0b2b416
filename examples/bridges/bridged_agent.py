"""An agent that a bridge process plays: `environment: {kind: chat, path: examples/bridges/bridged_agent.py}`.

The bridge (verifiers_bridge.py, or yours) gets the task's number, which is the row's ground truth, and the endpoint of
the episode, and answers with `{"score": ...}` and other numbers. Anything else loses the episode: megarl repeats it.
"""

import asyncio
import json
import urllib.error
import urllib.request

BRIDGE = "http://127.0.0.1:8765"


def ask(asked: dict[str, str]) -> dict[str, float]:
    request = urllib.request.Request(
        f"{BRIDGE}/run", data=json.dumps(asked).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the bridge: {error.read(2000).decode(errors='replace')}") from None


async def run(task, base_url, api_key):
    return await asyncio.to_thread(ask, {"task": task["ground_truth"], "base_url": base_url, "api_key": api_key})
