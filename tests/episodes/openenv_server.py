"""A guessing game behind OpenEnv's WebSocket, for tests: `python -m tests.episodes.openenv_server PORT`."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from aiohttp import WSMsgType, web

_ACTION = {
    "description": "A guess.",
    "properties": {"metadata": {"type": "object"}, "guess": {"type": "integer"}},
    "required": ["guess"],
    "type": "object",
}


async def _schema(_request: web.Request) -> web.Response:
    return web.json_response({"action": _ACTION, "observation": {}, "state": {}})


def _observed(text: str, *, reward: float | None, is_done: bool) -> dict[str, object]:
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": is_done}}


def _seen() -> dict[str, object]:
    """Return an observation with a screenshot, as those of a browser have one."""
    screenshot = [[[0, 0, 0]] * 32] * 24
    return {"type": "observation", "data": {"observation": {"text": "", "screenshot": screenshot}, "done": False}}


async def _play(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    secret = num_steps = 0
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            break
        asked = json.loads(message.data)
        match asked["type"]:
            case "reset" | "step" if -3 in asked["data"].values():
                await socket.send_json(_seen())
            case "reset":
                secret = asked["data"].get("secret", 7)
                await socket.send_json(_observed("Guess my number.", reward=None, is_done=False))
            case "step":
                guess = asked["data"].get("guess")
                if guess == -1:
                    os._exit(1)
                if guess == -2:
                    await asyncio.sleep(600)
                if not isinstance(guess, int):
                    await socket.send_json({"type": "error", "data": {"message": "guess must be an integer"}})
                    continue
                num_steps += 1
                is_right = guess == secret
                text = "right" if is_right else "higher" if guess < secret else "lower"
                await socket.send_json(_observed(text, reward=1.0 if is_right else -0.25, is_done=is_right))
            case "state":
                await socket.send_json({"type": "state", "data": {"episode_id": "e", "step_count": num_steps}})
            case _:
                break
    return socket


if __name__ == "__main__":
    app = web.Application()
    app.add_routes([web.get("/schema", _schema), web.get("/ws", _play)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=lambda *_: None)
