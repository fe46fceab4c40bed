"""The suite ``answers``: correct text for given pictures and options, alone and in a batch."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from epd_serve.verify.check import Failed, Skipped, Unjudged, check, require
from epd_serve.verify.client import Client, Reply, same, tokens_of
from epd_serve.verify.items import asked, clip, picture, rotated, sound

COLORS = ("red", "lime", "blue", "yellow", "black", "white")
_LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}


@check("answers", "sglang 35799, vllm 49692: answers differ from a monolithic server's", limit_s=120)
async def reference(client: Client) -> None:
    """Greedy answers about text and pictures equal the reference's."""
    for content in ("What colours are there?", *(asked(picture(color)) for color in COLORS)):
        wanted = await client.expected(content, **_LOGPROBS)
        same((await client.chat(content, **_LOGPROBS)).choices()[0], wanted, "compared with the reference")


async def _compare_batched(client: Client, contents: list[Any]) -> None:
    alone = [(await client.chat(content, **_LOGPROBS)).choices()[0] for content in contents]
    together = await asyncio.gather(*(client.chat(content, **_LOGPROBS) for content in contents))
    for wanted, reply in zip(alone, together, strict=True):
        same(reply.choices()[0], wanted, "in a batch, compared with alone")


@check("answers", "a 16-bit image hash that spliced two pictures")
async def batched(client: Client) -> None:
    """Concurrent requests with equal pictures, others of one size, and text get the same answers as alone."""
    pictures = [asked(picture(color)) for color in (*COLORS, "red", "red")]
    await _compare_batched(client, [*pictures, "What colours are there?"])


@check("answers", "features of neighbouring pictures mixed up in one request")
async def adjacent(client: Client) -> None:
    """Two pictures count twice the tokens of one, and the order of two different ones changes the logprobs."""
    counts = []
    for number in range(3):
        reply = await client.chat(asked(*[picture()] * number), max_tokens=1)
        if reply.status == 400 and number == 2:
            raise Skipped("the server accepts only one picture per request")
        reply.choices()
        counts.append(reply.usage()["prompt_tokens"])
    require(counts[2] - counts[1] == counts[1] - counts[0], f"prompt_tokens of 0, 1, 2 pictures: {counts}")
    orders = [("red", "blue"), ("blue", "red")]
    first = [(await client.chat(asked(*map(picture, order)), **_LOGPROBS)).choices()[0] for order in orders]
    if first[0] == first[1]:
        raise Failed("swapping two pictures changes neither text nor logprobs")


def _tokens(choice: Any) -> Sequence[Any]:
    """Return the tokens with their logprobs. Raises Skipped if the server returns none."""
    if not (tokens := tokens_of(choice)):
        raise Skipped("the server returns no logprobs")
    return tokens


async def _fingerprint(client: Client, content: Any) -> str:
    """Return the tokens and logprobs of an answer as comparable text."""
    choice = (await client.chat(content, **_LOGPROBS)).choices()[0]
    return repr([(one["token"], round(one["logprob"], 6)) for one in _tokens(choice)])


async def _distinguish(client: Client, parts: dict[str, Any], text: str) -> None:
    """Require different text or logprobs for each item."""
    seen: dict[str, str] = {}
    for name, item in parts.items():
        key = await _fingerprint(client, asked(item, text=text))
        require(key not in seen, f"{name} gets exactly the answer of {seen.get(key)}")
        seen[key] = name


@check("answers", "stale prefixes: block hashes without the picture's hash")
async def content(client: Client) -> None:
    """Different pictures of one size under one text get different text or logprobs."""
    await _distinguish(client, {color: picture(color) for color in COLORS}, "What color is it?")


def _accepted(reply: Reply) -> Any:
    """Return the first choice. Raises Skipped if the server refuses the request."""
    if 400 <= reply.status < 500 and not reply.is_busy:
        raise Skipped(f"the server refuses: {reply.error()[:120]}")
    return reply.choices()[0]


async def _check_clips(client: Client, clips: dict[str, Any]) -> None:
    """Require of videos or sounds what ``content`` and ``batched`` require of pictures."""
    _accepted(await client.chat(asked(next(iter(clips.values())), text="What is it?"), max_tokens=1))
    await _distinguish(client, clips, "What is it?")
    contents: list[Any] = [asked(one, text="What is it?") for one in clips.values()]
    await _compare_batched(client, [*contents, *contents, "What colours are there?"])


@check("answers", "vllm 54242, sglang 17824: videos through E", limit_s=180)
async def videos(client: Client) -> None:
    """Videos of one size and length get different answers, also by frame order, and the same in a batch."""
    frames = {"red, blue": ("red", "blue"), "red, lime": ("red", "lime"), "blue, red": ("blue", "red")}
    await _check_clips(client, {name: clip(colors) for name, colors in frames.items()})


@check("answers", "vllm 53675: sounds through E", limit_s=180)
async def sounds(client: Client) -> None:
    """Sounds of one length get different answers, and the same in a batch."""
    await _check_clips(client, {f"{hertz} Hz": sound(hertz) for hertz in (220, 880, 3520)})


@check("answers", "vllm 56786: 54 features for 475 placeholders, because options did not reach E")
async def options(client: Client) -> None:
    """Options for one request's pictures change its usage or are refused, and affect no other answer."""
    large = picture("red", (1024, 1024))
    low = {**large, "image_url": {**large["image_url"], "detail": "low"}}
    before = await client.chat(asked(large), **_LOGPROBS)
    bounds = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
    counts = []
    for reply in (
        await client.chat(asked(large), mm_processor_kwargs=bounds, **_LOGPROBS),
        await client.chat(asked(low), **_LOGPROBS),
    ):
        if reply.status == 400:
            continue
        reply.choices()
        counts.append(reply.usage()["prompt_tokens"])
    after = await client.chat(asked(large), **_LOGPROBS)
    same(after.choices()[0], before.choices()[0], "after a request with options")
    require(
        after.usage() == before.usage(),
        f"usage {after.usage()} after a request with options, {before.usage()} before",
    )
    whole = before.usage()["prompt_tokens"]
    require(
        all(count <= whole for count in counts), f"fewer pixels, more tokens: {counts}, {whole} without options"
    )
    if not any(count < whole for count in counts):
        raise Unjudged("neither max_pixels nor detail changes the number of tokens")


@check("answers", "phone pictures, rotated by a tag that some servers ignore")
async def exif(client: Client) -> None:
    """A picture with an EXIF rotation gets the answer of the rotated picture or of the one without the tag."""
    tagged, upright, plain = [await _fingerprint(client, asked(one)) for one in rotated()]
    require(tagged in (upright, plain), "the answer is that of neither the rotated nor the plain picture")
    if upright == plain:
        raise Unjudged("the rotated and the plain picture get the same answer")


_SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "known": {"type": "boolean"}},
    "required": ["color", "known"],
    "additionalProperties": False,
}


def _completed(reply: Reply) -> Any:
    """Return the choice of a guided answer. Raises Skipped if refused, Unjudged if max_tokens cut it."""
    choice = _accepted(reply)
    if choice["finish_reason"] == "length":
        raise Unjudged("max_tokens cut the answer")
    return choice


def _check_schema(text: str, stream: bool) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    is_right = isinstance(value, dict) and set(value) == {"color", "known"}
    is_right = is_right and value["color"] in ("red", "blue") and type(value["known"]) is bool
    require(is_right, f"{'streamed' if stream else 'plain'}: {text!r} does not match the schema")


@check("answers", "grammars lost between P and D", limit_s=90)
async def schemas(client: Client) -> None:
    """An answer with a JSON schema matches it, streamed and plain, with and without a picture."""
    form = {"type": "json_schema", "json_schema": {"name": "seen", "strict": True, "schema": _SCHEMA}}
    for stream in (False, True):
        for content in (asked(picture()), "What colours are there?"):
            reply = await client.chat(content, response_format=form, max_tokens=96, stream=stream)
            _check_schema(_completed(reply)["message"]["content"], stream)


@check("answers", "tools that work only in a monolithic server", limit_s=90)
async def tools(client: Client) -> None:
    """A required tool is called with arguments that match its parameters, streamed and plain."""
    tool = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": _SCHEMA}}
    chosen = {"type": "function", "function": {"name": "paint"}}
    for stream in (False, True):
        reply = await client.chat(asked(picture()), tools=[tool], tool_choice=chosen, max_tokens=96, stream=stream)
        calls = _completed(reply)["message"].get("tool_calls") or []
        require(len(calls) == 1, f"{len(calls)} calls: {reply.body[:200]!r}")
        require(calls[0]["function"]["name"] == "paint", f"the call is to {calls[0]['function']['name']!r}")
        _check_schema(calls[0]["function"]["arguments"], stream)


@check("answers", "vision towers that accept only RGB pictures")
async def formats(client: Client) -> None:
    """Palette, grey, 16-bit, alpha and CMYK pictures are answered, as PNG and JPEG."""
    for mode, form in (*((mode, "PNG") for mode in ("P", "L", "RGBA", "1", "I;16")), ("CMYK", "JPEG")):
        made = picture("red", mode=mode, form=form)
        require(bool((await client.chat(asked(made))).text()), f"{mode} as {form}: empty text")


@check("answers", "n > 1 lost between P and D")
async def choices(client: Client) -> None:
    """n = 3 returns three choices with indices 0 to 2; greedy ones are equal."""
    for stream in (False, True):
        reply = await client.chat(asked(picture()), n=3, stream=stream)
        is_greedy = reply.status != 400  # vLLM refuses several greedy choices
        if not is_greedy:
            reply = await client.chat(asked(picture()), n=3, stream=stream, temperature=1, seed=3)
        found = reply.choices()
        require([one["index"] for one in found] == [0, 1, 2], f"indices {[one['index'] for one in found]}")
        texts = {one["message"]["content"] for one in found}
        require(len(texts) == 1 or not is_greedy, "greedy choices differ")


@check("answers", "seeds not carried from P to D")
async def seeds(client: Client) -> None:
    """Equal seeds give equal texts."""
    fields = {"temperature": 1.5, "seed": 7, "max_tokens": 8}
    texts = {(await client.chat(asked(picture()), **fields)).text() for _ in range(3)}
    require(len(texts) == 1, f"one seed gave several texts: {sorted(texts)}")


@check("answers", "stop strings recognised only within one token")
async def stop(client: Client) -> None:
    """A stop string that spans two tokens ends the text before it."""
    for stream in (False, True):
        whole = (await client.chat()).text()
        found = re.search(r"\S \S\S", whole)
        if found is None:
            raise Unjudged(f"the text has fewer than two words: {whole!r}")
        wanted = found[0]
        reply = await client.chat(stop=[wanted], stream=stream)
        cut = whole[: whole.index(wanted)]
        require(reply.text() == cut, f"stop {wanted!r}: {reply.text()!r} instead of {cut!r}")
        require(reply.choices()[0]["finish_reason"] == "stop", "finish_reason is not 'stop'")


@check("answers", "a token sent by both P and D, or lost at the handover")
async def logprobs(client: Client) -> None:
    """The tokens of the logprobs form the text, match the usage in number, and have no logprob above 0."""
    for stream in (False, True):
        fields = {"stream_options": {"include_usage": True}} if stream else {}
        reply = await client.chat(asked(picture()), max_tokens=4, stream=stream, **_LOGPROBS, **fields)
        tokens = _tokens(reply.choices()[0])
        joined = b"".join(bytes(one["bytes"]) if one.get("bytes") else one["token"].encode() for one in tokens)
        begun = joined.decode(errors="replace").rstrip("\ufffd").split("<|")[0]
        require(reply.text().startswith(begun), f"the tokens say {begun!r}, the text says {reply.text()!r}")
        number = reply.usage()["completion_tokens"]
        require(number - len(tokens) in (0, 1), f"{len(tokens)} tokens have logprobs, the usage counts {number}")
        require(all(one["logprob"] <= 0 for one in tokens), "a logprob is above 0")


@check("answers", "vllm 56786: 54 features for 475 placeholders, HTTP 500")
async def placeholders(client: Client) -> None:
    """A placeholder typed by the user next to a picture is treated as text or refused by a 400, never a 500."""
    for mark in ("<image>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"):
        reply = await client.chat(asked(picture(), text=f"{mark} What color?"))
        require(reply.status in (200, 400), f"{mark}: status {reply.status}")
