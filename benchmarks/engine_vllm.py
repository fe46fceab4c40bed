"""vLLM as a benchmark's worker, run by the Python of vLLM's own environment: it imports nothing of this project.

Reads cases from standard input and answers with their times, as ``engine_native`` does. One process, the same
number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--compile", action="store_true", help="with torch.compile, as vLLM does by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    arguments = parser.parse_args()
    os.environ.update(
        OMP_NUM_THREADS=str(arguments.threads),
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_NUM_OF_RESERVED_CPU="1",
    )
    import torch

    torch.set_num_threads(arguments.threads)
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        enforce_eager=not arguments.compile,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 1, "video": 0},
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )
    torch.set_num_threads(arguments.threads)
    # pages of the cache are the system's to clear when first written: for all engines before the first case
    llm.collective_rpc(lambda worker: [cache.zero_() for cache in worker.model_runner.kv_caches] and None)

    def generate(batch: int, prompt: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(16, arguments.vocabulary, (batch, prompt), generator=generator).tolist()
        llm.generate(
            [{"prompt_token_ids": one} for one in ids],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        generate(**case)
        times = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
