"""The suite ``answers``: the right text for these pictures and options, alone and among others."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from epd_serve.verify.check import Failed, Skipped, Unjudged, check, require
from epd_serve.verify.client import Client, asked, picture, same

COLORS = ("red", "lime", "blue", "yellow", "black", "white")
_TOLD: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
#: Standard deviations from the expected number at which a sampled token is not by chance.
_SIGMAS = 4.5
_DRAWS = 64
#: Questions of which a model hardly knows how its answer begins.
_OPEN: tuple[Any, ...] = (
    asked(picture(), text="What colours are there?"),
    "Tell me a story.",
    "a",
    "x y z",
    "Name a color.",
)


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
    """Requests with pictures of one size and other content, and text, get at once what each gets alone."""
    await _alone_and_batched(client, [*(asked(picture(color)) for color in COLORS), "What colours are there?"])


@check("answers", "vllm 51222: one cached picture fails those after it")
async def one_picture(client: Client) -> None:
    """Requests that share a picture get at once what the first got alone."""
    content = asked(picture("orange"))
    wanted = (await client.chat(content, **_TOLD)).choices()[0]
    for reply in await asyncio.gather(*(client.chat(content, **_TOLD) for _ in range(8))):
        same(reply.choices()[0], wanted, "the same picture again")


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


@check("answers", "stale prefixes: a picture's hash missing from the block's")
async def content(client: Client) -> None:
    """Pictures of one size under one text are told apart, by text or by logprobs."""
    seen: dict[str, str] = {}
    for color in COLORS:
        choice = (await client.chat(asked(picture(color)), **_TOLD)).choices()[0]
        if not (choice.get("logprobs") or {}).get("content"):
            raise Skipped("the server gives no logprobs")
        key = repr([(one["token"], round(one["logprob"], 6)) for one in choice["logprobs"]["content"]])
        require(key not in seen, f"{color} is answered exactly as {seen.get(key)}")
        seen[key] = color


@check("answers", "towers that fail on pictures that are not RGB")
async def formats(client: Client) -> None:
    """Palette, grey, 16-bit, alpha and CMYK pictures, PNG and JPEG, are answered."""
    for mode, form in (
        ("P", "PNG"),
        ("L", "PNG"),
        ("RGBA", "PNG"),
        ("1", "PNG"),
        ("I;16", "PNG"),
        ("CMYK", "JPEG"),
    ):
        made = picture("red", mode=mode, form=form)
        require(bool((await client.chat(asked(made))).text()), f"{mode} as {form}: an empty text")


@check("answers", "n > 1 lost between P and D")
async def choices(client: Client) -> None:
    """n = 3 gives three choices, with indices 0 to 2, greedy ones all equal."""
    for stream in (False, True):
        found = (await client.chat(asked(picture()), n=3, stream=stream)).choices()
        require([one["index"] for one in found] == [0, 1, 2], f"indices {[one['index'] for one in found]}")
        require(len({one["message"]["content"] for one in found}) == 1, "greedy choices differ")


@check("answers", "seeds that are not carried from P to D")
async def seeds(client: Client) -> None:
    """A seed gives the same text again."""
    fields = {"temperature": 1.5, "seed": 7, "max_tokens": 8}
    texts = {(await client.chat(asked(picture()), **fields)).text() for _ in range(3)}
    require(len(texts) == 1, f"one seed gave {sorted(texts)}")


@check("answers", "options that P honours and D does not")
async def sampling(client: Client) -> None:
    """The first token is drawn as often as its logprob says."""
    for content in _OPEN:
        told = (await client.chat(content, max_tokens=1, **_TOLD)).choices()[0]
        if not (told.get("logprobs") or {}).get("content"):
            raise Skipped("the server gives no logprobs")
        top = max(told["logprobs"]["content"][0]["top_logprobs"], key=lambda one: float(one["logprob"]))
        share = math.exp(top["logprob"])
        if 0.05 < share < 0.75:
            break
    else:
        raise Unjudged("the model is sure of its first token")
    drawn = await asyncio.gather(
        *(client.chat(content, max_tokens=1, temperature=1, seed=seed, **_TOLD) for seed in range(_DRAWS))
    )
    told_of = [one.choices()[0]["logprobs"]["content"] for one in drawn]
    tokens = [one[0]["token"] if one else "" for one in told_of]  # the token that ends an answer is not told
    away = abs(tokens.count(top["token"]) - _DRAWS * share) / math.sqrt(_DRAWS * share * (1 - share))
    require(away <= _SIGMAS, f"{top['token']!r}: {tokens.count(top['token'])} of {_DRAWS}, a share of {share:.2g}")


@check("answers", "stop strings that are seen within a token only")
async def stop(client: Client) -> None:
    """A stop string that begins in one token and ends in the next cuts the text before it."""
    for stream in (False, True):
        whole = (await client.chat()).text()
        words = whole.split(" ")
        if len(words) < 3 or len(words[1]) < 2:
            raise Unjudged(f"the text is too short: {whole!r}")
        wanted = f"{words[0][-1]} {words[1][:2]}"
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
        choice = reply.choices()[0]
        told = (choice.get("logprobs") or {}).get("content")
        if not told:
            raise Skipped("the server gives no logprobs")
        tokens = [one["token"] for one in told]
        require(reply.text().startswith("".join(tokens[:4]).split("<|")[0]), f"{tokens} are not {reply.text()!r}")
        require(
            reply.usage()["completion_tokens"] - len(tokens) in (0, 1), f"{len(tokens)} tokens, {reply.usage()}"
        )
        require(all(one["logprob"] <= 0 for one in told), "a logprob above 0")


@check("answers", "vllm 56786: 54 features for 475 placeholders, HTTP 500")
async def placeholders(client: Client) -> None:
    """A placeholder that a user types beside a picture is text or a 400, and never a 500."""
    for mark in ("<image>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"):
        reply = await client.chat(asked(picture(), text=f"{mark} What color?"))
        require(reply.status in (200, 400), f"{mark}: status {reply.status}")
