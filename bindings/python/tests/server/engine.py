"""A stand-in inference engine: a real HTTP server that answers as SGLang does.

It answers recorded requests (by their input_ids) with their recorded replies, and any other one
from a small policy (numbers made up, or a network of torch) with a small tokenizer, whose chat
template continues a conversation token by token. It does what a request asks for, no more: flat,
plain, nested or support candidates, prompt ids, meta_info. Failures come on demand.

By itself, for benchmarks: engine.py --port 0 --tokens 2000 [--delay 0.1]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

DATA = Path(__file__).resolve().parents[4] / "tests" / "data"
START, END = 1, 2
ROLES = {"system": 10, "user": 11, "assistant": 12, "tool": 13}
WORD = 1000  # the id of "w0 "
VOCABULARY = 50_000
CHAT = "/v1/chat/completions"


# ---------------------------------------------------------------- tokens


def word(token: int) -> str:
    return "" if token == END else f"w{token - WORD} "


def tokenize(text: str) -> list[int]:
    """Words of the policy have their ids; other text is one id a word."""
    ids = []
    for part in text.split():
        known = part[0] == "w" and part[1:].isdigit()
        ids.append(WORD + int(part[1:]) if known else 100 + sum(part.encode()) % 800)
    return ids


def render(messages: list[dict[str, Any]]) -> list[int]:
    """The chat template: the ids of the whole prompt."""
    ids: list[int] = []
    for message in messages:
        text = message.get("content") or ""
        if isinstance(text, list):
            text = " ".join(part.get("text", "") for part in text)
        for call in message.get("tool_calls") or []:
            text += json.dumps(call["function"])
        ids += [START, ROLES[message["role"]], *tokenize(text), END]
    return [*ids, START, ROLES["assistant"]]


# ---------------------------------------------------------------- the policy


class Generation:
    """What the policy samples after a prompt: n tokens with k candidates each."""

    def __init__(self, prompt: list[int], n: int, k: int, salt: int = 0) -> None:
        rng = np.random.default_rng([len(prompt), sum(prompt) % 65_521, salt])
        self.n, self.k = n, k
        ids: Any = WORD + rng.integers(0, VOCABULARY, n)  # NumPy's own types differ by version
        self.tokens: list[int] = ids.tolist()
        if n:
            self.tokens[-1] = END
        raw = np.sort(rng.normal(0, 3, (n, k + 1)).astype(np.float32), axis=1)[:, ::-1]
        shifted = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True)) - 0.01
        self.logprobs: Any = shifted[:, 0].astype(np.float32) if n else np.zeros(0, np.float32)
        self.top_logprobs: Any = shifted[:, :k].astype(np.float32)
        first = np.array(self.tokens, np.int64)[:, None]
        self.top_ids: Any = ((first + np.arange(k)[None, :] * 7) % (WORD + VOCABULARY)).astype(
            np.int32
        )

    @property
    def text(self) -> str:
        return "".join(map(word, self.tokens))


class Sampled(Generation):
    """The same of a network: policy.step(token, state), as rollstore.example has one. Its tokens
    are the first words; whatever else a prompt has is one of them to it."""

    def __init__(self, policy: Any, prompt: list[int], n: int, k: int, salt: int = 0) -> None:
        import torch

        self.n, self.k = n, k
        chance = torch.Generator().manual_seed(salt + 31 * len(prompt))
        rows, tokens, state = [], [], None
        with torch.no_grad():
            for token in heard(prompt):
                logits, state = policy.step(torch.tensor([token]), state)
            for _ in range(n):
                rows.append(torch.log_softmax(logits[0], -1))
                tokens.append(int(torch.multinomial(rows[-1].exp(), 1, generator=chance)))
                logits, state = policy.step(torch.tensor([tokens[-1]]), state)
        self.tokens = [WORD + token for token in tokens]
        logprobs = torch.stack(rows) if rows else torch.zeros(0, k)
        top = logprobs.topk(k)
        self.logprobs = logprobs.numpy()[np.arange(n), tokens]
        self.top_logprobs = top.values.numpy()
        self.top_ids = (WORD + top.indices).numpy().astype(np.int32)


def heard(ids: list[int]) -> list[int]:
    """A prompt as the network has it, of 32 tokens."""
    return [(token - WORD) % 32 for token in ids]


def numbers(array: Any) -> list[float]:
    return [float(value) for value in array]


def flat_fields(made: Generation, b64: bool) -> dict[str, Any]:
    prefix = "output_top_logprobs_"
    values, ids = made.top_logprobs, made.top_ids
    fields: dict[str, Any] = {prefix + "shape": [made.n, made.k], prefix + "null_prefix": 0}
    if b64:
        for name, array, dtype in (("val", values, "float32"), ("idx", ids, "int32")):
            fields[f"{prefix}{name}_flat_b64"] = base64.b64encode(array.tobytes()).decode()
            fields[f"{prefix}{name}_flat_b64_dtype"] = dtype
    else:
        fields[prefix + "val_flat"] = numbers(values.ravel())
        fields[prefix + "idx_flat"] = ids.ravel().tolist()
    return fields


def nested_rows(made: Generation) -> list[Any]:
    return [
        [[float(v), int(i), word(int(i))] for v, i in zip(values, ids)]
        for values, ids in zip(made.top_logprobs, made.top_ids)
    ]


def support_fields(made: Generation) -> dict[str, Any]:
    widths = [1 + (5 * i) % made.k for i in range(made.n)]
    return {
        "output_token_sampling_mask": [row[:w].tolist() for row, w in zip(made.top_ids, widths)],
        "output_token_sampling_logprobs": [
            numbers(row[:w]) for row, w in zip(made.top_logprobs, widths)
        ],
    }


# ---------------------------------------------------------------- the reply


def meta_info(request: dict[str, Any], made: Generation, engine: Engine) -> dict[str, Any]:
    flat = request.get("return_flat_raw_output_top_logprobs") and not engine.ignores_flat
    meta: dict[str, Any] = {
        "id": "0123456789",
        "finish_reason": {"type": "stop", "matched": END},
        "weight_version": engine.weight_version,
        "completion_tokens": made.n,
    }
    if request.get("logprobs"):
        meta["output_token_logprobs"] = [
            [float(v), t, None if flat else word(t)] for v, t in zip(made.logprobs, made.tokens)
        ]
    if request.get("return_sampling_mask"):
        meta.update(support_fields(made))
    elif request.get("top_logprobs"):
        if flat:
            meta.update(flat_fields(made, bool(request.get(engine.b64_flag))))
        else:
            meta["output_top_logprobs"] = nested_rows(made)
    return meta


def content_logprobs(request: dict[str, Any], made: Generation, flat: bool) -> dict[str, Any]:
    content = []
    for i, token in enumerate(made.tokens):
        top: list[Any] = []
        if request.get("top_logprobs") and not flat:
            top = [
                {"token": word(int(t)), "bytes": list(word(int(t)).encode()), "logprob": float(v)}
                for v, t in zip(made.top_logprobs[i], made.top_ids[i])
            ]
        text = word(token)
        content.append(
            {
                "token": text,
                "bytes": list(text.encode()),
                "logprob": float(made.logprobs[i]),
                "top_logprobs": top,
            }
        )
    return {"content": content}


def message_of(request: dict[str, Any], made: Generation) -> tuple[dict[str, Any], str]:
    """A tool call when there are tools and the last message is the user's."""
    tools, last = request.get("tools"), (request.get("messages") or [{}])[-1]
    if tools and last.get("role") == "user" and request.get("tool_choice") != "none":
        function = {"name": tools[0]["function"]["name"], "arguments": json.dumps({"q": made.text})}
        call = {"id": "call_0", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    text = made.text
    return {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}, (
        "stop"
    )


def reply_of(request: dict[str, Any], engine: Engine) -> dict[str, Any]:
    prompt = request.get("input_ids") or render(request["messages"])
    n = min(request.get("max_tokens") or engine.tokens, engine.tokens)
    k = request.get("top_logprobs") or request.get("top_k") or 1
    made = engine.generate(prompt, n, max(k, 1))
    message, finish = message_of(request, made)
    flat = bool(request.get("return_flat_raw_output_top_logprobs")) and not engine.ignores_flat
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": content_logprobs(request, made, flat) if request.get("logprobs") else None,
        "finish_reason": finish,
        "matched_stop": END,
    }
    if request.get("return_meta_info"):
        choice["meta_info"] = meta_info(request, made, engine)
    if request.get("return_prompt_token_ids") and not engine.ignores_prompt:
        choice["prompt_token_ids"] = prompt
    usage = {"prompt_tokens": len(prompt), "completion_tokens": n, "total_tokens": len(prompt) + n}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": request.get("model", "policy"),
        "choices": [choice],
        "usage": usage,
    }


# ---------------------------------------------------------------- the server


class Engine:
    """The server. Settings may be changed while it runs.

    failures: what happens to the next requests, one each: a status (500), "close" (no reply),
        "cut" (half a reply), "redirect", "zip" (compressed), "odd message", "garbage",
        "error" (an error with status 200), "abort" (no tokens),
        "hang" (until released or left).
    seen: the requests, parsed. aborted: requests whose client left before the reply.
    """

    def __init__(self, tokens: int = 12, delay: float = 0.0) -> None:
        self.tokens = tokens
        self.delay = delay
        self.salt = 0
        self.policy: Any = None  # a network; without one, numbers that look like one's
        self.weight_version = "1"
        self.ignores_flat = False
        self.ignores_prompt = False
        self.b64_flag = "return_flat_raw_top_logprobs_b64"
        self.failures: deque[int | str] = deque()
        self.seen: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.aborted = 0
        self.running = 0
        self.release = asyncio.Event()
        self.recorded: dict[tuple[int, ...], bytes] = {}
        self.cached: dict[tuple[Any, ...], bytes] | None = None
        self.runner: web.AppRunner | None = None
        self.url = ""

    def generate(self, prompt: list[int], n: int, k: int) -> Generation:
        if self.policy is None:
            return Generation(prompt, n, k, self.salt)
        return Sampled(self.policy, prompt, n, k, self.salt)

    def load_sessions(self) -> None:
        """Answer the fixture's recorded requests."""
        for line in (DATA / "sessions.jsonl").read_bytes().splitlines():
            entry = json.loads(line)
            if "turn" in entry:
                key = tuple(entry["request"]["input_ids"])
                text = json.dumps(entry["response"], ensure_ascii=False, separators=(",", ":"))
                self.recorded[key] = text.encode()

    async def start(self, port: int = 0) -> str:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post(CHAT, self._chat), web.get("/v1/models", self._models)])
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        self.release.set()
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        request = json.loads(body)
        if self.cached is None:  # benchmarks keep nothing
            self.seen.append(request)
            self.bodies.append(body)
            self.headers.append(dict(http.headers))
        failure = self.failures.popleft() if self.failures else None
        self.running += 1
        try:
            await self._take_time(http, failure)
            if failure is not None and failure != "hang":
                return await self._fail(http, request, failure)
            if request.get("stream"):
                return await self._stream(http, request)
            return web.Response(body=self._reply(request), content_type="application/json")
        finally:
            self.running -= 1

    async def _take_time(self, http: web.Request, failure: int | str | None) -> None:
        if failure == "hang":
            while not self.release.is_set():
                if http.transport is None or http.transport.is_closing():
                    self.aborted += 1
                    raise ConnectionResetError
                await asyncio.sleep(0.01)
        elif self.delay:
            await asyncio.sleep(self.delay)

    def _reply(self, request: dict[str, Any]) -> bytes:
        recorded = self.recorded.get(tuple(request.get("input_ids") or ()))
        if recorded is not None:
            return recorded
        if self.cached is None:
            return json.dumps(reply_of(request, self), separators=(",", ":")).encode()
        names = ("top_logprobs", "return_flat_raw_output_top_logprobs", "logprobs", "max_tokens")
        key = (*(request.get(name) for name in names), "return_prompt_token_ids" in request)
        if key not in self.cached:
            made = reply_of(request, self)
            self.cached[key] = json.dumps(made, separators=(",", ":")).encode()
        return self.cached[key]

    async def _fail(
        self, http: web.Request, request: dict[str, Any], failure: int | str
    ) -> web.StreamResponse:
        if isinstance(failure, int):
            error = {"object": "error", "message": f"failure {failure}", "code": failure}
            return web.json_response(error, status=failure)
        if failure == "redirect":
            return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})
        if failure == "zip":
            whole = web.json_response(reply_of(request, self))
            whole.enable_compression(web.ContentCoding.gzip)
            return whole
        if failure == "odd message":
            odd = reply_of(request, self)
            odd["choices"][0]["message"] = "text"
            return web.json_response(odd)
        if failure == "garbage":
            return web.Response(body=b'{"choices":[{', content_type="application/json")
        if failure == "error":
            error = {"object": "error", "message": "The request queue is full.", "code": 503}
            return web.json_response(error)
        if failure == "abort":
            return web.Response(body=self._aborted(request), content_type="application/json")
        assert http.transport is not None
        if failure == "cut":
            reply = self._reply(request)
            response = web.StreamResponse(headers={"Content-Length": str(len(reply))})
            await response.prepare(http)
            await response.write(reply[: len(reply) // 2])
        http.transport.close()
        raise ConnectionResetError

    def _aborted(self, request: dict[str, Any]) -> bytes:
        tokens, self.tokens = self.tokens, 0
        try:
            reply = reply_of(request, self)
        finally:
            self.tokens = tokens
        reply["choices"][0]["finish_reason"] = "abort"
        reply["choices"][0]["meta_info"]["finish_reason"] = {"type": "abort"}
        return json.dumps(reply).encode()

    async def _stream(self, http: web.Request, request: dict[str, Any]) -> web.StreamResponse:
        """As engines stream, for evaluation sessions."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        reply = reply_of(request, self)
        for part in reply["choices"][0]["message"]["content"].split(" "):
            chunk = {"choices": [{"index": 0, "delta": {"content": part + " "}}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each reply")
    given = parser.parse_args()
    engine = Engine(given.tokens, given.delay)
    engine.cached = {}
    print(await engine.start(given.port), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until it is closed
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
