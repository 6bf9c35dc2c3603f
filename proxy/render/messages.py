"""The messages of a request, as a chat template expects them.

Clients write the same thing in many ways; the rules that bring them to one are here and nowhere else. They are vLLM's,
so that a prompt is the same on either server, except that a malformed message is refused, with its place, and never
guessed at. The input is not changed.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from proxy.protocol.errors import BadRequest
from proxy.protocol.generate import JsonObject
from proxy.render.template_facts import ContentFormat

Json: TypeAlias = Any  # JSON from the request, passed through


class ContentPart(TypedDict):
    """An image, audio or video that the engine fetches; `url` may be a `data:` URL."""

    type: Literal["image_url", "audio_url", "video_url"]
    url: str
    uuid: NotRequired[str]


@dataclass(frozen=True, slots=True)
class NormalisedMessages:
    """`content_parts` are in the order in which the template writes their placeholders."""

    messages: list[JsonObject]
    content_parts: list[ContentPart]


TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Part type -> the key of its text."""

# Part type -> what the template is given, what the engine is given.
_Medium = tuple[Literal["image", "audio", "video"], Literal["image_url", "audio_url", "video_url"]]
_MEDIA_PARTS: dict[str, _Medium] = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "image_url"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "audio_url"),
    "audio": ("audio", "audio_url"),
    "video_url": ("video", "video_url"),
    "video": ("video", "video_url"),
}


def normalise(
    messages: list[JsonObject], *, content_format: ContentFormat, knows_developer: bool
) -> NormalisedMessages:
    """Raises BadRequest naming the place, such as `messages[3].tool_calls[0].function.arguments`."""
    media: list[ContentPart] = []
    normalised = [
        _normalise_message(message, f"messages[{index}]", content_format, knows_developer, media)
        for index, message in enumerate(messages)
    ]
    return NormalisedMessages(normalised, media)


def _normalise_message(
    message: Json, place: str, content_format: ContentFormat, knows_developer: bool, media: list[ContentPart]
) -> JsonObject:
    _expect(isinstance(message, dict), place, "an object", message)
    role = message.get("role")
    _expect(isinstance(role, str) and role != "", f"{place}.role", "a non-empty string", role)
    result = dict(message)
    result["content"] = _normalise_content(message.get("content"), f"{place}.content", role, content_format, media)
    if role == "developer" and not knows_developer:
        result["role"] = "system"
    if role == "assistant":
        result.pop("tool_calls", None)
        if calls := _normalise_calls(message.get("tool_calls"), f"{place}.tool_calls"):
            result["tool_calls"] = calls
        _name_reasoning_twice(result, place)
    return result


def _normalise_content(
    content: Json, place: str, role: str, content_format: ContentFormat, media: list[ContentPart]
) -> str | list[JsonObject]:
    """Text as parts, joined to one string unless the template takes parts; a tool result of text is always joined.

    None is the empty content of either kind.
    """
    _expect(content is None or isinstance(content, str | list), place, "a string or a list of parts", content)
    if isinstance(content, str):
        parts = [_text_part(content)]
    else:
        parts = [_normalise_part(part, f"{place}[{i}]", content_format, media) for i, part in enumerate(content or ())]
    only_text = all(part["type"] == "text" for part in parts)
    if content_format == "string" or (role == "tool" and only_text):
        keep_empty = content_format == "parts"  # vLLM drops empty texts on one road and not on the other
        return "\n".join(part["text"] for part in parts if part["text"] or keep_empty)
    return parts


def _text_part(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _normalise_part(part: Json, place: str, content_format: ContentFormat, media: list[ContentPart]) -> JsonObject:
    if isinstance(part, str):
        return _text_part(part)
    _expect(isinstance(part, dict), place, "an object with a `type`, or a string", part)
    kind = part.get("type")
    _expect(isinstance(kind, str), f"{place}.type", "a string", kind)
    if key := TEXT_PARTS.get(kind):
        _expect(isinstance(part.get(key), str), f"{place}.{key}", "a string", part.get(key))
        return _text_part(part[key])
    if kind not in _MEDIA_PARTS:
        known = ", ".join([*TEXT_PARTS, *_MEDIA_PARTS])
        raise BadRequest(f"`{place}.type` is {kind!r}, which is not a known part. Known are {known}.", param=place)
    if content_format == "string":
        raise BadRequest(
            f"`{place}` is of type {kind!r}, but the model's chat template takes text only. Send text, "
            "or use a model whose template has placeholders for such parts.",
            param=place,
        )
    template_type, engine_type = _MEDIA_PARTS[kind]
    item: ContentPart = {"type": engine_type, "url": _url_of(part, kind, template_type, place)}
    if part.get("uuid") is not None:
        item["uuid"] = str(part["uuid"])
    media.append(item)
    return {"type": template_type}


def _url_of(part: JsonObject, kind: str, medium: str, place: str) -> str:
    """`{kind: url}`, `{kind: {"url": url}}`, `{"url": url}`, and OpenAI's `input_audio`, which holds base64."""
    if kind == "input_audio" and isinstance(audio := part.get("input_audio"), dict):
        data, format = audio.get("data"), audio.get("format")
        _expect(isinstance(data, str) and data != "", f"{place}.input_audio.data", "audio in base64", data)
        _expect(isinstance(format, str) and format != "", f"{place}.input_audio.format", "'wav' or the like", format)
        return f"data:audio/{format};base64,{data}"
    key = next((key for key in (kind, f"{medium}_url", "url") if part.get(key) is not None), kind)
    url = part.get(key)
    if isinstance(url, dict):
        key, url = f"{key}.url", url.get("url")
    _expect(isinstance(url, str) and url != "", f"{place}.{key}", "a URL", url)
    return str(url)


def _normalise_calls(calls: Json, place: str) -> list[JsonObject]:
    _expect(calls is None or isinstance(calls, list), place, "a list of tool calls", calls)
    return [_normalise_call(call, f"{place}[{index}]") for index, call in enumerate(calls or ())]


def _normalise_call(call: Json, place: str) -> JsonObject:
    _expect(isinstance(call, dict), place, "an object", call)
    kind = call.get("type", "function")
    _expect(kind == "function", f"{place}.type", "'function'", kind)
    function = call.get("function")
    _expect(isinstance(function, dict), f"{place}.function", "an object with `name` and `arguments`", function)
    name = function.get("name")
    _expect(isinstance(name, str) and name != "", f"{place}.function.name", "a non-empty string", name)
    arguments = _parse_arguments(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: Json, place: str) -> JsonObject:
    """Templates read an object; the API's form is a string of JSON. Nothing is no arguments."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadRequest(
                f"`{place}` must be a JSON object as a string, but is not JSON: {error}. "
                "Send the arguments as the model's answer gave them, or mend them.",
                param=place,
            ) from error
    if parsed is None and arguments is None:
        return {}
    _expect(isinstance(parsed, dict), place, "a JSON object", parsed)
    return dict(parsed)


def _name_reasoning_twice(message: JsonObject, place: str) -> None:
    """Clients send `reasoning` (vLLM's name today) or `reasoning_content`; templates read one or the other."""
    given = {name: message[name] for name in ("reasoning", "reasoning_content") if message.get(name) is not None}
    for name, text in given.items():
        _expect(isinstance(text, str), f"{place}.{name}", "a string", text)
    if given:
        only = next(iter(given.values()))
        message.update({"reasoning": only, "reasoning_content": only} | given)


_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


def _expect(condition: bool, place: str, expected: str, value: Json) -> None:
    if condition:
        return
    if value is None:
        found = "is missing"
    elif value == "":
        found = "is empty"
    elif expected.startswith("'"):
        found = f"is {value!r}"
    else:
        found = f"is {_JSON_NAMES.get(type(value), type(value).__name__)}"
    raise BadRequest(f"`{place}` must be {expected}, but {found}.", param=place)
