"""P-D with all its services and real sockets in one process; the decode instance has too few blocks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import tiny_models
from fleet import Books
from in_process import serving
from pictures import noise, png
from PIL import Image
from reference import Reference

from epd_serve.instance.instance import Instance
from epd_serve.protocol import wire
from epd_serve.types import SamplingParams

MAX_TOKENS = 40
QUESTIONS: list[tuple[str, list[Image.Image]]] = [
    ("Say apple", []),
    ("What is this?", [noise(1)]),
    ("What is in the picture?", [noise(2, (60, 140)), noise(3, (90, 90))]),
    ("Where is it?", [noise(4, (90, 70))]),
    ("What is 2 + 3?", []),
]


async def ask(prefill: Instance, decode: Instance, name: str, text: str, images: list[Image.Image]) -> list[str]:
    """As a gateway does; the answer's tokens."""
    refs = [wire.MediaRef(f"{hash(i.tobytes()):016x}" * 4, i.width, i.height) for i in images]
    content = [wire.Part(type="image")] * len(images) + [wire.Part(type="text", text=text)]
    request = wire.PrefillRequest(
        request_id=name,
        output=wire.OutputOptions(kind="chat", id=name, created=0, model="tiny"),
        sampling=SamplingParams(
            seed=0, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0, skip_special_tokens=False
        ),
        items=refs,
        messages=[wire.ChatMessage(role="user", content=content)],
        decode_url=decode.url,
    )
    async with asyncio.TaskGroup() as tasks:
        decoding = tasks.create_task(decode.language.decoder.decode(wire.DecodeRequest(name, stream=False)))
        for ref, image in zip(refs, images, strict=True):
            encode = wire.EncodeRequest(request_id=name, ref=ref, media=png(image), announce_to=prefill.url)
            tasks.create_task(prefill.encoder.encode(encode))
        handing_over = await prefill.language.prefiller.prefill(request)
        assert handing_over.stream is not None
        _ = [piece async for piece in handing_over.stream]
        handing_over.on_close()
    reply = decoding.result()
    reply.on_close()
    choice = json.loads(reply.body)["choices"][0]
    return [bytes(token["bytes"]).decode(errors="replace") for token in choice["logprobs"]["content"]]


async def test_a_small_decode_instance_answers_all_at_once(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference = Reference(path)
    expected = [
        [reference.tokenizer.decode([i]) for i in reference.generate(text, images, max_tokens=MAX_TOKENS)]
        for text, images in QUESTIONS
    ]
    async with (
        serving(path, "EP") as prefill,
        serving(path, "D", num_blocks=28) as decode,
    ):
        for number in range(10):  # until they meet at the decode instance
            answers = await asyncio.gather(
                *(ask(prefill, decode, f"{number}-{i}", *question) for i, question in enumerate(QUESTIONS))
            )
            assert answers == expected
            metrics = decode.render_metrics().decode()
            (preempted,) = [
                line for line in metrics.splitlines() if line.startswith("epd_serve_instance_preemptions_total")
            ]
            if float(preempted.split()[1]) > 0:
                break
        assert float(preempted.split()[1]) > 0
        await Books({"ep": prefill.url, "d": decode.url}).check()
