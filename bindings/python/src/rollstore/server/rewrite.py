"""A client's training request as it is sent to the engine.

Messages and token ids, which are most of a request, are neither parsed nor written anew: their
bytes pass through. So a request costs the event loop about the same whatever it has in its context.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rollstore import ReplyError, _rollstore
from rollstore.server.errors import Refusal
from rollstore.server.settings import Settings
from rollstore.sglang import RequestRefused, training_request

__all__ = ["Training", "training"]

_FLAT_FLAGS = (
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "return_flat_raw_output_top_logprobs_b64",
)
_PROMPT_FLAG = "return_prompt_token_ids"
_AS_THEY_ARE = ("messages", "input_ids")


class Training(NamedTuple):
    """A training request, ready to be sent.

    body: for the engine. prompt: int32 bytes of the request's token ids, where it has them.
    The others are what the agent asked for.
    """

    body: bytes
    prompt: bytes | None
    temperature: float | None
    stream: bool
    include_usage: bool
    logprobs: bool
    meta_info: bool
    token_ids: bool


def training(body: bytes, settings: Settings) -> Training:
    """Raises Refusal for a request that cannot be recorded."""
    raw, request = _parse(body)
    try:
        _check(request)
        sent = _rewritten(request, settings)
        ids = raw.get("input_ids")
        given = ids is not None and ids != b"null"
        prompt = _rollstore.json_token_ids(ids) if given and ids else None
    except RequestRefused as refused:
        raise Refusal(400, "request", str(refused), param=refused.field, retry=False) from None
    except ReplyError as error:
        raise Refusal(400, "request", error.message, param="input_ids", retry=False) from None
    if prompt is None:
        sent[_PROMPT_FLAG] = True
    options = request.get("stream_options")
    temperature = sent.get("temperature")
    return Training(
        body=_written(sent, request, raw),
        prompt=prompt,
        temperature=float(temperature) if isinstance(temperature, (int, float)) else None,
        stream=request.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=request.get("logprobs") is True,
        meta_info=request.get("return_meta_info") is True,
        token_ids=request.get(_PROMPT_FLAG) is True or request.get("return_token_ids") is True,
    )


def _parse(body: bytes) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Each member's bytes, and each member parsed; the large ones stay bytes."""
    try:
        members = _rollstore.json_object(body)
    except ReplyError as error:
        raise Refusal(400, "request", f"the request is no object: {error.message}") from None
    raw: dict[str, bytes] = {}
    request: dict[str, Any] = {}
    for spelled, value in members:
        name = json.loads(spelled)
        raw[name] = value
        try:
            request[name] = value if name in _AS_THEY_ARE else json.loads(value)
        except (ValueError, RecursionError) as error:
            message = f"{name[:64]}: {error}"
            raise Refusal(400, "request", message, param=name[:64], retry=False) from None
    return raw, request


def _check(request: dict[str, Any]) -> None:
    """What cannot be recorded, beyond what training_request refuses."""
    count = request.get("n")
    if count is not None and (isinstance(count, bool) or count != 1):
        raise RequestRefused("n", "a turn has one choice", "send 1, or open a session for each")
    stream = request.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestRefused("stream", "is neither true nor false", "leave it out or send one")


def _rewritten(request: dict[str, Any], settings: Settings) -> dict[str, Any]:
    sent = training_request(
        request,
        settings.top_k,
        mode=settings.mode,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.sample_top_k,
        b64_flag=settings.b64_flag,
    )
    if settings.request == "none":
        # The sampled tokens are recorded all the same.
        sent.update(logprobs=True, return_meta_info=True)
        sent.pop("top_logprobs", None)
    if settings.request != "flat":
        for flag in _FLAT_FLAGS:
            sent.pop(flag, None)
    sent.pop("stream", None)
    sent.pop("stream_options", None)
    return sent


def _written(sent: dict[str, Any], request: dict[str, Any], raw: dict[str, bytes]) -> bytes:
    """The request's text; what was not changed is written as the client spelled it."""
    pieces = []
    for name, value in sent.items():
        same = name in request and request[name] is value
        text = raw[name] if same else json.dumps(value).encode()
        pieces.append(json.dumps(name).encode() + b":" + text)
    return b"{" + b",".join(pieces) + b"}"
