"""A judge on loopback, and what it replies."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from megarl.config.reward import JudgeRewardConfig


class Judge:
    """A server on loopback that gives one reply after the other, the last again and again."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, bytes]] = [(200, b"1")]
        self.pause_s = 0.0
        self.retry_after_s: int | None = None
        self.encoding: str | None = None
        self.requests: list[tuple[float, dict[str, str], dict[str, object]]] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, reply = outer.enter(dict(self.headers), body)
                time.sleep(outer.pause_s)
                outer.leave()
                self.send_response(status)
                if outer.retry_after_s is not None:
                    self.send_header("Retry-After", str(outer.retry_after_s))
                if status == 302:
                    self.send_header("Location", outer.url + "/elsewhere")
                if outer.encoding is not None:
                    self.send_header("Content-Encoding", outer.encoding)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *_arguments: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/judge"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def enter(self, headers: dict[str, str], body: dict[str, object]) -> tuple[int, bytes]:
        with self._lock:
            self.requests.append((time.monotonic(), headers, body))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def leave(self) -> None:
        with self._lock:
            self._at_once -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def completion(answer: str, *, model: str = "judge-1", tokens: int = 40, version: str | None = None) -> bytes:
    reply = {
        "model": model,
        "system_fingerprint": version,
        "choices": [{"message": {"role": "assistant", "content": answer}}],
    }
    return json.dumps({**reply, "usage": {"total_tokens": tokens}}).encode()


def chat_judge(server: Judge, **keys: object) -> JudgeRewardConfig:
    template = "Question: {prompt} Right: {ground_truth} Given: {response} Is it right? {unknown}"
    whole = {
        "kind": "judge",
        "url": server.url,
        "model": "judge",
        "template": template,
        "answers": {"yes": 1, "no": -1},
    }
    return JudgeRewardConfig.model_validate({**whole, **keys})
