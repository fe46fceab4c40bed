"""Fixtures that several areas share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from own_ports import own_ports

# Neither torch nor transformers is imported here: that takes above 10 s, which pytest-xdist's controller and the
# tests that need neither save. Triton's kernels run in its interpreter where there is no GPU; it must know before
# transformers imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A background job of a shell ignores Ctrl-C, and so would each program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's affair, not the code's. Every run of a commit tries the same examples:
# few are enough, and others are searched for with --hypothesis-profile=search.
for name, derandomize, max_examples in (("suite", True, 30), ("search", False, 500)):
    hypothesis.settings.register_profile(
        name,
        deadline=None,
        derandomize=derandomize,
        max_examples=max_examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("suite")

#: Folders whose files take longest, and begin first: no process is left with one of them in the end.
_LONG = ("end_to_end", "hosts", "instance", "proxy", "engine", "media", "verify", "docs")
_MODELS: dict[str, Path] = {}


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite in three processes, as much of it is waiting; what is asked for by name in this one."""
    return 3 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {config.rootpath / "tests" / folder: place for place, folder in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.parent, len(_LONG)))


@pytest.fixture(scope="session", autouse=True)
def _own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Deployments of tests neither meet those of whoever runs them nor leave logs there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPD_SERVE_LOG_DIR", str(tmp_path_factory.mktemp("logs")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests run beside the processes that they start; more threads would only make them wait for each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_ports() -> Iterator[None]:
    with own_ports():
        yield


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl", "llava"])
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight model directory of each family, made once however often the fixture is set up anew."""
    import tiny_models

    kind = request.param
    if kind not in _MODELS:
        _MODELS[kind] = tiny_models.make_tiny_model(kind, tmp_path_factory.mktemp("models") / kind)
    return _MODELS[kind]
