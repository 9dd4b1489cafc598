"""An answer as a stream of server-sent events, for agents that asked for one.

The engine was asked for a whole reply, since a turn is stored before the agent sees any of it; so
the stream comes at once: the message in one piece, the end, the usage where it was asked for.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["events"]

# JSON strings hold no line ends; those around values would end the event.
_NO_LINE_ENDS = bytes.maketrans(b"\r\n", b"  ")
_ELSEWHERE = ("index", "message", "logprobs", "finish_reason", "delta")


def events(answer: bytes, logprobs: bytes | None, include_usage: bool) -> bytes:
    """The stream's bytes.

    answer: a chat reply, without its first choice's logprobs; these are `logprobs`, as JSON.
    """
    reply: dict[str, Any] = json.loads(answer)
    head = {
        "id": reply.get("id"),
        "object": "chat.completion.chunk",
        "created": reply.get("created"),
        "model": reply.get("model"),
    }
    choices = reply.get("choices") or [{}]
    choice: dict[str, Any] = choices[0]
    more = {name: value for name, value in choice.items() if name not in _ELSEWHERE}
    end = {"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason"), **more}
    chunks = [
        _message_chunk(head, _delta(choice.get("message") or {}), logprobs),
        _chunk({**head, "choices": [end]}),
    ]
    if include_usage:
        chunks.append(_chunk({**head, "choices": [], "usage": reply.get("usage")}))
    chunks.append(b"data: [DONE]\n\n")
    return b"".join(chunks)


def _chunk(content: dict[str, Any]) -> bytes:
    return b"data: " + _text(content) + b"\n\n"


def _text(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _message_chunk(head: dict[str, Any], delta: dict[str, Any], logprobs: bytes | None) -> bytes:
    """The logprobs go in as they are: they may be large, and need no reading."""
    beginning = _text(head)[:-1] + b',"choices":[{"index":0,"delta":' + _text(delta)
    ending = b',"logprobs":' + (logprobs or b"null") + b',"finish_reason":null}]}'
    return b"data: " + beginning + ending.translate(_NO_LINE_ENDS) + b"\n\n"


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    """A message as one delta: its members, with an index on each tool call."""
    delta = {"role": "assistant"}
    delta.update({name: value for name, value in message.items() if value is not None})
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        delta["tool_calls"] = [
            {**call, "index": at} if isinstance(call, dict) else call
            for at, call in enumerate(calls)
        ]
    return delta
