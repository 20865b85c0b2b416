"""Environments of verifiers as agents of megarl: this process runs them, in an environment of its own.

    uv venv bridge && uv pip install --python bridge/bin/python verifiers==0.4.0 PACKAGE_OF_YOUR_TASKSET
    bridge/bin/python examples/bridges/verifiers_bridge.py TASKSET --port 8765
    curl -s http://127.0.0.1:8765/tasks > tasks.jsonl
    megarl data prepare rows --from tasks.jsonl --out data/tasks

The recipe then has `environment: {kind: chat, path: examples/bridges/bridged_agent.py}`. A request to /run names a task
and the endpoint of one episode; verifiers plays it there and the answer is its reward. An episode that verifiers could
not play is an error, not a reward: megarl plays it again.
"""

import argparse
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from uuid import uuid4

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.env import Env
from verifiers.v1.utils.loaders import load_environment


@contextmanager
def variable_of(key: str) -> Iterator[str]:
    """Yield the name of a variable with the key of one episode: verifiers takes keys from variables alone."""
    name = f"MEGARL_KEY_{uuid4().hex}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


def tasks_of(env: Env, count: int | None) -> list[vf.Task]:
    return list(env.taskset.select(vf.SelectConfig(limit=count)))


def text_of(prompt: object) -> str:
    """Return a prompt as text; a task may open its conversation itself and have none."""
    if isinstance(prompt, str) or prompt is None:
        return prompt or "(the task opens the conversation)"
    return "\n".join(str(getattr(message, "content", message)) for message in prompt)


def application(env: Env, tasks: list[vf.Task]) -> web.Application:
    async def list_tasks(_: web.Request) -> web.Response:
        rows = [{"prompt": text_of(task.data.prompt), "answer": str(number)} for number, task in enumerate(tasks)]
        return web.Response(text="".join(f"{json.dumps(row)}\n" for row in rows))

    async def run(request: web.Request) -> web.Response:
        asked = await request.json()
        number = int(asked["task"])
        if not 0 <= number < len(tasks):
            return web.json_response({"error": f"there is no task {number}; there are {len(tasks)}"}, status=404)
        (slot,) = env.slots(tasks[number])
        with variable_of(asked["api_key"]) as name:
            client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=name)
            episode = await env.run_slot(slot, vf.ModelContext(model="policy", client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            told = errors[0].message if errors else "it gave no reason"
            return web.json_response({"error": f"verifiers did not play the task: {told}"}, status=502)
        trace = episode.traces[0]
        return web.json_response({"score": trace.reward, **trace.metrics})

    async def serve(_: web.Application) -> AsyncIterator[None]:
        async with env.serving():
            yield

    app = web.Application()
    app.add_routes([web.get("/tasks", list_tasks), web.post("/run", run)])
    app.cleanup_ctx.append(serve)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a taskset of verifiers to megarl's agents.")
    parser.add_argument("taskset", help="as `vf-eval` names it")
    parser.add_argument("--harness", default="null", help="the agent of verifiers that plays a task")
    parser.add_argument("--runtime", default="subprocess", help="where its programs run: subprocess, docker, ...")
    parser.add_argument("--tasks", type=int, help="take so many; all if not given")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765, help="0 takes a free one, and prints it")
    arguments = parser.parse_args()
    agent = {"harness": {"id": arguments.harness}, "runtime": {"type": arguments.runtime}}
    config = vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": arguments.taskset}, "agent": agent})
    env = load_environment(config)
    web.run_app(application(env, tasks_of(env, arguments.tasks)), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
