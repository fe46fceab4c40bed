"""An engine of vLLM on vllm-ascend's worker answers chats on an NPU of host memory; run by vLLM's Python.

Standard input has the arguments of ``vllm serve``, its variables, and the messages of each chat. The answer's last
line has the tokens, how often torch_npu's operators were called, and what :mod:`watching` saw of the KV.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from npu_on_host import HostOperators, SlotMapping


def answer(arguments: list[str], variables: dict[str, str], chats: list[Any], max_tokens: int) -> dict[str, Any]:
    os.environ.update(variables)
    operators = HostOperators()  # before vLLM registers operators of its own
    import vllm.v1.worker.block_table as table
    import vllm_ascend.worker.block_table as ascend_table
    import watching
    from mooncake.engine import TransferEngine
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    given.model = given.model_tag
    table._compute_slot_mapping_kernel = ascend_table._compute_slot_mapping_kernel = SlotMapping()
    with operators:
        engine = LLM.from_engine_args(EngineArgs.from_cli_args(given))
        operators.calls.clear()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        outputs = [
            engine.chat(chat, sampling, use_tqdm=False, chat_template_content_format="openai")[0] for chat in chats
        ]
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "calls": operators.calls,
        "regions": TransferEngine.regions,
        "kv": watching.SEEN,
    }


if __name__ == "__main__":
    print(json.dumps(answer(**json.load(sys.stdin))))
