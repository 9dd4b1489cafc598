"""What a training request to an SGLang engine must say, and the requests that cannot be trained on.

Score centering needs the distribution each token was sampled from, so a rollout request asks for
candidates, and must sample from nothing else than softmax(logits / temperature), or, in support
mode, its top-k / top-p part as the engine reports it. `training_request` adds the fields and fills
in the settings; what would sample from another distribution is refused with `RequestRefused`.

    selected   the k most likely tokens of the full distribution, recorded beside each sampled token
    support    all the tokens that filtered sampling could choose from, at most k of them

Two endpoints: "chat" (`/v1/chat/completions`, sampling settings at the top of the request) and
"generate" (`/generate`, sampling settings under `sampling_params`: an object, absent, or a list of
objects for a batch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

__all__ = ["RequestRefused", "training_request"]

Mode = Literal["selected", "support"]
Endpoint = Literal["chat", "generate"]

_FLAT_FLAG = "return_flat_raw_output_top_logprobs"
# Engine builds differ in the name of the second flag; both are dropped before the right one is set.
_B64_FLAGS = ("return_flat_raw_top_logprobs_b64", "return_flat_raw_output_top_logprobs_b64")
_SETTINGS = ("temperature", "top_p", "top_k", "min_p")


class RequestRefused(ValueError):
    """A request whose tokens could not be trained on: its recorded distribution would be wrong.

    field: path of the field in the request, such as `sampling_params.top_p` or
        `tools[1].function.strict`.
    reason: what is wrong with it.
    advice: what to do instead.
    """

    def __init__(self, field: str, reason: str, advice: str) -> None:
        super().__init__(field, reason, advice)
        self.field = field
        self.reason = reason
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}; {self.advice}"


class _Settings(NamedTuple):
    """The training settings, checked."""

    k: int
    mode: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float


def training_request(
    request: Mapping[str, Any],
    k: int,
    *,
    mode: Mode = "selected",
    endpoint: Endpoint = "chat",
    temperature: float,
    top_p: float = 1.0,
    top_k: int = -1,
    min_p: float = 0.0,
    evaluation: bool = False,
    b64_flag: str = "return_flat_raw_top_logprobs_b64",
) -> dict[str, Any]:
    """The request to send to the engine, so that its reply can be recorded and trained on.

    request: the client's, as decoded JSON. It is not modified; the result is a new dictionary that
        shares the values it did not change.
    k: candidates a token. 0 leaves the request as it is.
    mode: "selected" or "support", see the module.
    endpoint: "chat" or "generate".
    temperature, top_p, top_k, min_p: the training settings. They fill the fields that the client
        left out or sent as null, since the engine would else take the model's own defaults. What
        the client did send must equal `temperature`; in selected mode `top_p` is 1 and `top_k` -1;
        `min_p` is 0. In support mode the client may choose its own `top_p`, and a `top_k` from 1 to
        k.
    evaluation: True leaves the request as it is: it is not trained on.
    b64_flag: the name that the engine build gives the flag that asks for base64.

    Fields owned by the training settings, whatever the client sent for them:

    - selected, chat: `logprobs`, `top_logprobs`, `return_flat_raw_output_top_logprobs`, `b64_flag`
      and `return_meta_info` are set.
    - selected, generate: `return_logprob` and `top_logprobs_num` are set, the flat flags dropped:
      the engine decodes no candidate text here, so the nested form costs little.
    - support: `return_sampling_mask` and `sampling_logprobs_mode` are set, `top_logprobs`,
      `top_logprobs_num` and the flat flags dropped. The sampled token's own logprob is needed all
      the same: chat also gets `logprobs` and `return_meta_info`, generate `return_logprob`.
    - selected drops `sampling_logprobs_mode`. Both names of the base64 flag are dropped where it is
      not set.

    Refused, on either endpoint, at the top of the request and in each object of `sampling_params`
    on generate. A field that is null counts as left out; `true` and `false` are not numbers, nor is
    a string:

    - `temperature` not a finite positive number, or not the settings'
    - `min_p` other than 0
    - selected: `top_p` other than 1, `top_k` other than -1
    - support: `top_k` not from 1 to k; `top_p` not over 0 and up to 1
    - `presence_penalty` or `frequency_penalty` other than 0, `repetition_penalty` other than 1
    - `min_tokens` or `min_new_tokens` other than 0
    - `logit_bias` or `custom_params` other than an empty object
    - `regex`, `json_schema`, `ebnf`, `structural_tag`, `custom_logit_processor` of any value
    - `response_format` other than `{"type": "text"}`, which is the engine's default
    - `tool_choice` other than "auto" and "none"
    - a tool with `strict` other than false, in the tool or in its `function`
    - `use_beam_search` other than false; `beam_width`, `beam_size`, `num_beams` or `best_of` other
      than 1

    `n` is free: each choice is sampled, and recorded, by itself.

    Raises RequestRefused for a request; TypeError or ValueError, naming the argument, for arguments
    that no request could be right with.
    """
    settings = _check_settings(k, mode, endpoint, temperature, top_p, top_k, min_p, b64_flag)
    if not isinstance(request, Mapping):
        raise TypeError(f"request: a mapping is needed, got {type(request).__name__}")
    out = dict(request)
    if evaluation or settings.k == 0:
        return out
    if endpoint == "chat":
        out = _with_sampling(out, settings)
        _check_fields(out, settings, "")
    else:
        out["sampling_params"] = _filled_sampling_params(out.get("sampling_params"), settings)
        # The engine reads few of them here, but whoever wrote one meant it.
        _check_fields(out, settings, "")
    _set_candidate_fields(out, settings, endpoint, b64_flag)
    return out


def _set_candidate_fields(
    request: dict[str, Any], settings: _Settings, endpoint: str, b64_flag: str
) -> None:
    for name in (_FLAT_FLAG, *_B64_FLAGS, b64_flag):
        request.pop(name, None)
    if settings.mode == "support":
        for name in ("top_logprobs", "top_logprobs_num"):
            request.pop(name, None)
        request |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    else:
        request.pop("sampling_logprobs_mode", None)
    if endpoint == "generate":
        request["return_logprob"] = True
        if settings.mode == "selected":
            request["top_logprobs_num"] = settings.k
        return
    request |= {"logprobs": True, "return_meta_info": True}
    if settings.mode == "selected":
        request |= {"top_logprobs": settings.k, _FLAT_FLAG: True, b64_flag: True}


def _with_sampling(fields: Mapping[str, Any], settings: _Settings) -> dict[str, Any]:
    """A copy with the settings' values where the client left them out."""
    out = dict(fields)
    for name in _SETTINGS:
        if out.get(name) is None:
            out[name] = getattr(settings, name)
    return out


def _filled_sampling_params(value: Any, settings: _Settings) -> Any:
    """`sampling_params`, an object or a list of them, filled and checked."""
    path = "sampling_params"
    if value is None:
        value = {}
    if not isinstance(value, list):
        return _filled_object(value, settings, path)
    if not value:
        raise RequestRefused(path, "is an empty list", "send one object, or one for each prompt")
    return [_filled_object(item, settings, f"{path}[{i}]") for i, item in enumerate(value)]


def _filled_object(value: Any, settings: _Settings, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestRefused(path, f"is {_kind(value)}", "send an object of sampling settings")
    filled = _with_sampling(value, settings)
    _check_fields(filled, settings, f"{path}.")
    return filled


# --- what is refused -----------------------------------------------------------------------------


def _check_fields(fields: Mapping[str, Any], settings: _Settings, prefix: str) -> None:
    """Refuse what `fields` says; `prefix` is the path of `fields` in the request."""
    for name, check in _SAMPLING_CHECKS:
        value = fields.get(name)
        if value is not None:
            check(value, settings, f"{prefix}{name}")
    for name, is_neutral, reason, advice in _NEUTRAL:
        value = fields.get(name)
        if value is not None and not is_neutral(value):
            raise RequestRefused(f"{prefix}{name}", f"{_shown(value)} {reason}", advice)
    _check_tools(fields.get("tools"), f"{prefix}tools")


def _check_temperature(value: Any, settings: _Settings, path: str) -> None:
    advice = f"leave it out or send {settings.temperature}"
    if not _is_number(value) or not _is_finite(value) or value <= 0:
        raise RequestRefused(path, f"{_shown(value)} is not a finite positive number", advice)
    if value != settings.temperature:
        reason = f"{_shown(value)} is not what the trainer computes its logprobs at"
        raise RequestRefused(path, reason, advice)


def _check_min_p(value: Any, _: _Settings, path: str) -> None:
    if not _is_number(value) or value != 0:
        reason = f"{_shown(value)} cuts tokens that the record would give probability"
        raise RequestRefused(path, reason, "leave it out or send 0")


def _check_top_p(value: Any, settings: _Settings, path: str) -> None:
    if settings.mode == "selected" and not (_is_number(value) and value == 1):
        reason = f"{_shown(value)} cuts the distribution that candidates are recorded from"
        raise RequestRefused(path, reason, "leave it out or send 1, or train in support mode")
    if not (_is_number(value) and 0 < value <= 1):
        reason = f"{_shown(value)} is not over 0 and up to 1"
        raise RequestRefused(path, reason, "leave it out or send such a number")


def _check_top_k(value: Any, settings: _Settings, path: str) -> None:
    if settings.mode == "selected":
        if not _is_integer(value) or value != -1:
            reason = f"{_shown(value)} cuts the distribution that candidates are recorded from"
            raise RequestRefused(path, reason, "leave it out or send -1, or train in support mode")
        return
    if not _is_integer(value) or value < 1:
        reason = f"{_shown(value)} sets no bound on the support to be recorded"
        raise RequestRefused(path, reason, f"send an integer from 1 to {settings.k}")
    if value > settings.k:
        reason = f"{_shown(value)} is more than the {settings.k} candidates a record holds"
        raise RequestRefused(path, reason, f"send {settings.k} or less, or record more candidates")


_SAMPLING_CHECKS = (
    ("temperature", _check_temperature),
    ("min_p", _check_min_p),
    ("top_p", _check_top_p),
    ("top_k", _check_top_k),
)


def _check_tools(tools: Any, path: str) -> None:
    """Refuse a tool whose arguments the engine would hold to a grammar."""
    if tools is None:
        return
    if not isinstance(tools, list):
        raise RequestRefused(path, f"is {_kind(tools)}", "send a list of tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestRefused(f"{path}[{i}]", f"is {_kind(tool)}", "send an object")
        function = tool.get("function")
        places = [(f"{path}[{i}].strict", tool)]
        if isinstance(function, Mapping):
            places.append((f"{path}[{i}].function.strict", function))
        for place, holder in places:
            strict = holder.get("strict")
            if strict is not None and strict is not False:
                raise RequestRefused(
                    place,
                    "would hold the tool's arguments to a grammar, which the record does not know",
                    "leave it out or send false",
                )


def _number(neutral: float) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and value == neutral


def _empty_object(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _never(_: Any) -> bool:
    return False


def _is_text_format(value: Any) -> bool:
    """{"type": "text"}, with nothing else that is not null."""
    if not isinstance(value, Mapping) or value.get("type") != "text":
        return False
    return all(item is None for name, item in value.items() if name != "type")


def _rows(
    names: Iterable[str], is_neutral: Callable[[Any], bool], reason: str, advice: str
) -> list[tuple[str, Callable[[Any], bool], str, str]]:
    return [(name, is_neutral, reason, advice) for name in names]


# Name, whether a value changes nothing, why another is refused, and what to do.
_NEUTRAL = [
    *_rows(
        ("presence_penalty", "frequency_penalty"),
        _number(0),
        "moves the sampled distribution with the text so far",
        "leave it out or send 0",
    ),
    *_rows(
        ("repetition_penalty",),
        _number(1),
        "moves the sampled distribution with the text so far",
        "leave it out or send 1",
    ),
    *_rows(
        ("min_tokens", "min_new_tokens"),
        _number(0),
        "forbids the end of text at first, which the record does not know",
        "leave it out or send 0",
    ),
    *_rows(
        ("logit_bias",),
        _empty_object,
        "moves the sampled distribution away from the model's",
        "leave it out",
    ),
    *_rows(
        ("regex", "json_schema", "ebnf", "structural_tag"),
        _never,
        "would hold the text to a grammar, which the record does not know",
        "leave it out",
    ),
    *_rows(
        ("response_format",),
        _is_text_format,
        "would hold the text to a grammar, which the record does not know",
        'leave it out or send {"type": "text"}',
    ),
    *_rows(
        ("tool_choice",),
        lambda value: isinstance(value, str) and value in ("auto", "none"),
        "would force a tool call by a grammar, which the record does not know",
        'leave it out or send "auto" or "none"',
    ),
    *_rows(
        ("custom_logit_processor",),
        _never,
        "moves the sampled distribution away from the model's",
        "leave it out",
    ),
    *_rows(
        ("custom_params",),
        _empty_object,
        "is for a logit processor, which moves the sampled distribution",
        "leave it out",
    ),
    *_rows(
        ("use_beam_search",),
        lambda value: value is False,
        "chooses tokens by search, and does not sample them",
        "leave it out or send false",
    ),
    *_rows(
        ("beam_width", "beam_size", "num_beams", "best_of"),
        _number(1),
        "chooses among continuations, and does not sample one",
        "leave it out or send 1",
    ),
]


# --- arguments and values ------------------------------------------------------------------------


def _check_settings(
    k: int,
    mode: str,
    endpoint: str,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    b64_flag: str,
) -> _Settings:
    if not _is_integer(k):
        raise TypeError(f"k: an integer is needed, got {_kind(k)}")
    if k < 0:
        raise ValueError(f"k: 0 or more is needed, got {k}")
    if mode not in ("selected", "support"):
        raise ValueError(f'mode: "selected" or "support" is needed, got {mode!r}')
    if endpoint not in ("chat", "generate"):
        raise ValueError(f'endpoint: "chat" or "generate" is needed, got {endpoint!r}')
    if not isinstance(b64_flag, str):
        raise TypeError(f"b64_flag: a string is needed, got {_kind(b64_flag)}")
    if b64_flag in ("", _FLAT_FLAG):
        raise ValueError(f"b64_flag: the name of the flag for base64 is needed, got {b64_flag!r}")
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if not _is_number(value):
            raise TypeError(f"{name}: a number is needed, got {_kind(value)}")
    if not _is_integer(top_k):
        raise TypeError(f"top_k: an integer is needed, got {_kind(top_k)}")
    settings = _Settings(k, mode, temperature, top_p, top_k, min_p)
    if k > 0:
        _check_values(settings)
    return settings


def _check_values(settings: _Settings) -> None:
    """The settings must themselves be what a request is held to."""
    if not _is_finite(settings.temperature) or settings.temperature <= 0:
        raise ValueError(
            f"temperature: a finite positive number is needed, got {settings.temperature}"
        )
    if settings.min_p != 0:
        raise ValueError(f"min_p: training needs 0, got {settings.min_p}")
    if settings.mode == "selected":
        if settings.top_p != 1:
            raise ValueError(f"top_p: selected mode needs 1, got {settings.top_p}")
        if settings.top_k != -1:
            raise ValueError(f"top_k: selected mode needs -1, got {settings.top_k}")
        return
    if not 0 < settings.top_p <= 1:
        raise ValueError(f"top_p: a number over 0 and up to 1 is needed, got {settings.top_p}")
    if settings.top_k != -1 and not 1 <= settings.top_k <= settings.k:
        raise ValueError(
            f"top_k: 1 to k, {settings.k}, is needed, or -1 where each request brings its own, "
            f"got {settings.top_k}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    # math.isfinite fails on an integer beyond float's range, which JSON can hold.
    return isinstance(value, int) or math.isfinite(value)


def _kind(value: Any) -> str:
    """The JSON kind of a value, as a client knows it."""
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list"}
    if isinstance(value, Mapping):
        return "an object"
    return "a number" if _is_number(value) else names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    """A value short enough for a message: numbers and short strings as they are."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "a number"
    text = repr(value)
    scalar = value is None or isinstance(value, (bool, int, float, str))
    return text if scalar and len(text) <= 40 else _kind(value)
