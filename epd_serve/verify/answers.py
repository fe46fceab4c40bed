"""The suite ``answers``: the right text for these pictures and options, alone and among others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from epd_serve.verify.check import Failed, Skipped, Unjudged, check, require
from epd_serve.verify.client import Client, Reply, same, tokens_of
from epd_serve.verify.items import asked, clip, picture, sound, turned

COLORS = ("red", "lime", "blue", "yellow", "black", "white")
_TOLD: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}


@check("answers", "sglang 35799, vllm 49692: other answers than the monolithic server's", limit_s=120)
async def reference(client: Client) -> None:
    """Greedy answers about text and pictures are the reference's."""
    for content in ("What colours are there?", *(asked(picture(color)) for color in COLORS)):
        wanted = await client.expected(content, **_TOLD)
        same((await client.chat(content, **_TOLD)).choices()[0], wanted, "against the reference")


async def _alone_and_batched(client: Client, contents: list[Any]) -> None:
    alone = [(await client.chat(content, **_TOLD)).choices()[0] for content in contents]
    together = await asyncio.gather(*(client.chat(content, **_TOLD) for content in contents))
    for wanted, reply in zip(alone, together, strict=True):
        same(reply.choices()[0], wanted, "among others against alone")


@check("answers", "a 16-bit image hash that spliced two pictures")
async def batched(client: Client) -> None:
    """Requests with equal pictures, others of the same size, and text, get at once what each gets alone."""
    pictures = [asked(picture(color)) for color in (*COLORS, "red", "red")]
    await _alone_and_batched(client, [*pictures, "What colours are there?"])


@check("answers", "features of neighbours spliced in one request")
async def adjacent(client: Client) -> None:
    """Two equal pictures count twice the tokens of one, and the order of two others matters to logprobs."""
    counts = []
    for number in range(3):
        reply = await client.chat(asked(*[picture()] * number), max_tokens=1)
        if reply.status == 400 and number == 2:
            raise Skipped("the server takes one picture a request")
        reply.choices()
        counts.append(reply.usage()["prompt_tokens"])
    require(counts[2] - counts[1] == counts[1] - counts[0], f"prompt_tokens of 0, 1, 2 pictures: {counts}")
    orders = [("red", "blue"), ("blue", "red")]
    first = [(await client.chat(asked(*map(picture, order)), **_TOLD)).choices()[0] for order in orders]
    if first[0] == first[1]:
        raise Failed("the order of two pictures changes neither text nor logprobs")


def _tokens(choice: Any) -> Sequence[Any]:
    """The tokens of an answer with their logprobs. Raises Skipped where the server gives none."""
    if not (tokens := tokens_of(choice)):
        raise Skipped("the server gives no logprobs")
    return tokens


def _told(choice: Any) -> str:
    """The tokens of an answer and their logprobs, in a form in which two answers can be compared."""
    return repr([(one["token"], round(one["logprob"], 6)) for one in _tokens(choice)])


async def _told_apart(client: Client, parts: dict[str, Any], text: str) -> None:
    """Items under one text are told apart, by text or by logprobs."""
    seen: dict[str, str] = {}
    for name, item in parts.items():
        key = _told((await client.chat(asked(item, text=text), **_TOLD)).choices()[0])
        require(key not in seen, f"{name} is answered exactly as {seen.get(key)}")
        seen[key] = name


@check("answers", "stale prefixes: a picture's hash missing from the block's")
async def content(client: Client) -> None:
    """Pictures of one size under one text are told apart, by text or by logprobs."""
    await _told_apart(client, {color: picture(color) for color in COLORS}, "What color is it?")


def _accepted(reply: Reply) -> Any:
    """The first choice. Raises Skipped for a request that the server refuses."""
    if 400 <= reply.status < 500 and not reply.is_busy:
        raise Skipped(f"the server refuses: {reply.error()[:120]}")
    return reply.choices()[0]


async def _clips(client: Client, clips: dict[str, Any]) -> None:
    """Show for items of another kind what holds for pictures."""
    _accepted(await client.chat(asked(next(iter(clips.values())), text="What is it?"), max_tokens=1))
    await _told_apart(client, clips, "What is it?")
    contents: list[Any] = [asked(one, text="What is it?") for one in clips.values()]
    await _alone_and_batched(client, [*contents, *contents, "What colours are there?"])


@check("answers", "vllm 54242, sglang 17824: videos through E", limit_s=180)
async def videos(client: Client) -> None:
    """Videos of one size and length are told apart, in their order of frames too, and batched as alone."""
    frames = {"red, blue": ("red", "blue"), "red, lime": ("red", "lime"), "blue, red": ("blue", "red")}
    await _clips(client, {name: clip(colors) for name, colors in frames.items()})


@check("answers", "vllm 53675: sounds through E", limit_s=180)
async def sounds(client: Client) -> None:
    """Sounds of one length are told apart, and batched as alone."""
    await _clips(client, {f"{hertz} Hz": sound(hertz) for hertz in (220, 880, 3520)})


@check("answers", "vllm 56786: 54 features for 475 placeholders, as options did not reach E")
async def options(client: Client) -> None:
    """Options of one request's pictures count in its usage or are refused, and change no other answer."""
    large = picture("red", (1024, 1024))
    low = {**large, "image_url": {**large["image_url"], "detail": "low"}}
    before = await client.chat(asked(large), **_TOLD)
    bounds = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
    counts = []
    for reply in (
        await client.chat(asked(large), mm_processor_kwargs=bounds, **_TOLD),
        await client.chat(asked(low), **_TOLD),
    ):
        if reply.status == 400:
            continue
        reply.choices()
        counts.append(reply.usage()["prompt_tokens"])
    after = await client.chat(asked(large), **_TOLD)
    same(after.choices()[0], before.choices()[0], "after a request with other options")
    require(after.usage() == before.usage(), f"usage {after.usage()}, {before.usage()} before the options")
    whole = before.usage()["prompt_tokens"]
    require(all(count <= whole for count in counts), f"fewer pixels, more tokens: {counts}, {whole} without")
    if not any(count < whole for count in counts):
        raise Unjudged("neither max_pixels nor detail changes the number of tokens")


@check("answers", "pictures of phones, turned by a tag that only some servers read")
async def exif(client: Client) -> None:
    """A picture whose EXIF tag turns it is answered as the turned one, or as if it had no tag."""
    tagged, upright, plain = (asked(one) for one in turned())
    told = [_told((await client.chat(one, **_TOLD)).choices()[0]) for one in (tagged, upright, plain)]
    require(told[0] in told[1:], "a picture with an EXIF tag is answered neither as the turned one nor as without")
    if told[1] == told[2]:
        raise Unjudged("the turned and the plain picture have one answer")


_SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "known": {"type": "boolean"}},
    "required": ["color", "known"],
    "additionalProperties": False,
}


def _ended(reply: Reply) -> Any:
    """The choice of a guided answer. Raises Skipped where it is refused, Unjudged where max_tokens cut it."""
    choice = _accepted(reply)
    if choice["finish_reason"] == "length":
        raise Unjudged("the answer was not over within its max_tokens")
    return choice


def _fits(text: str, stream: bool) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    is_right = isinstance(value, dict) and set(value) == {"color", "known"}
    is_right = is_right and value["color"] in ("red", "blue") and type(value["known"]) is bool
    require(is_right, f"{'streamed' if stream else 'plain'}: {text!r} does not fit the schema")


@check("answers", "grammars that are lost between P and D", limit_s=90)
async def schemas(client: Client) -> None:
    """An answer that is to fit a JSON schema fits it, streamed and not, with a picture and without."""
    form = {"type": "json_schema", "json_schema": {"name": "seen", "strict": True, "schema": _SCHEMA}}
    for stream in (False, True):
        for content in (asked(picture()), "What colours are there?"):
            reply = await client.chat(content, response_format=form, max_tokens=96, stream=stream)
            _fits(_ended(reply)["message"]["content"], stream)


@check("answers", "tools that work in a monolithic server only", limit_s=90)
async def tools(client: Client) -> None:
    """A tool that has to be called is called, with arguments that fit its parameters, streamed and not."""
    tool = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": _SCHEMA}}
    chosen = {"type": "function", "function": {"name": "paint"}}
    for stream in (False, True):
        reply = await client.chat(asked(picture()), tools=[tool], tool_choice=chosen, max_tokens=96, stream=stream)
        calls = _ended(reply)["message"].get("tool_calls") or []
        require(len(calls) == 1, f"{len(calls)} calls: {reply.body[:200]!r}")
        require(calls[0]["function"]["name"] == "paint", f"a call of {calls[0]['function']['name']!r}")
        _fits(calls[0]["function"]["arguments"], stream)


@check("answers", "towers that fail on pictures that are not RGB")
async def formats(client: Client) -> None:
    """Palette, grey, 16-bit, alpha and CMYK pictures, PNG and JPEG, are answered."""
    for mode, form in (*((mode, "PNG") for mode in ("P", "L", "RGBA", "1", "I;16")), ("CMYK", "JPEG")):
        made = picture("red", mode=mode, form=form)
        require(bool((await client.chat(asked(made))).text()), f"{mode} as {form}: an empty text")


@check("answers", "n > 1 lost between P and D")
async def choices(client: Client) -> None:
    """n = 3 gives three choices, with indices 0 to 2, greedy ones all equal."""
    for stream in (False, True):
        reply = await client.chat(asked(picture()), n=3, stream=stream)
        is_greedy = reply.status != 400  # vLLM refuses several greedy choices
        if not is_greedy:
            reply = await client.chat(asked(picture()), n=3, stream=stream, temperature=1, seed=3)
        found = reply.choices()
        require([one["index"] for one in found] == [0, 1, 2], f"indices {[one['index'] for one in found]}")
        texts = {one["message"]["content"] for one in found}
        require(len(texts) == 1 or not is_greedy, "greedy choices differ")


@check("answers", "seeds that are not carried from P to D")
async def seeds(client: Client) -> None:
    """A seed gives the same text again."""
    fields = {"temperature": 1.5, "seed": 7, "max_tokens": 8}
    texts = {(await client.chat(asked(picture()), **fields)).text() for _ in range(3)}
    require(len(texts) == 1, f"one seed gave {sorted(texts)}")


@check("answers", "stop strings that are seen within a token only")
async def stop(client: Client) -> None:
    """A stop string that begins in one token and ends in the next cuts the text before it."""
    for stream in (False, True):
        whole = (await client.chat()).text()
        found = re.search(r"\S \S\S", whole)
        if found is None:
            raise Unjudged(f"no two words: {whole!r}")
        wanted = found[0]
        reply = await client.chat(stop=[wanted], stream=stream)
        cut = whole[: whole.index(wanted)]
        require(reply.text() == cut, f"stop {wanted!r}: {reply.text()!r} in place of {cut!r}")
        require(reply.choices()[0]["finish_reason"] == "stop", "finish_reason is not 'stop'")


@check("answers", "a token sent by P and by D: doubled or lost at the handover")
async def logprobs(client: Client) -> None:
    """The tokens of the logprobs are the text, as many as the usage says, none above 0."""
    for stream in (False, True):
        fields = {"stream_options": {"include_usage": True}} if stream else {}
        reply = await client.chat(asked(picture()), max_tokens=4, stream=stream, **_TOLD, **fields)
        told = _tokens(reply.choices()[0])
        spoken = b"".join(bytes(one["bytes"]) if one.get("bytes") else one["token"].encode() for one in told)
        begun = spoken.decode(errors="replace").rstrip("\ufffd").split("<|")[0]
        require(reply.text().startswith(begun), f"{begun!r} by its tokens, {reply.text()!r} by its text")
        number = reply.usage()["completion_tokens"]
        require(number - len(told) in (0, 1), f"{len(told)} tokens told, {number} in the usage")
        require(all(one["logprob"] <= 0 for one in told), "a logprob above 0")


@check("answers", "vllm 56786: 54 features for 475 placeholders, HTTP 500")
async def placeholders(client: Client) -> None:
    """A placeholder that a user types beside a picture is text or a 400, and never a 500."""
    for mark in ("<image>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"):
        reply = await client.chat(asked(picture(), text=f"{mark} What color?"))
        require(reply.status in (200, 400), f"{mark}: status {reply.status}")
