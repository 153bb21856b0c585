"""Fixtures: one tiny model, one server for the whole session, clients of two tenants, and exported adapters."""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_PROJECT_ID", "TINKER_TAGS"):
    os.environ.pop(name, None)
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import reference  # noqa: E402
import serving  # noqa: E402
import tinker  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return serving.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def plain(model: Path) -> reference.Reference:
    """The model in PyTorch."""
    return reference.Reference(model)


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Server]:
    """One server for the whole session."""
    running = serving.Server(tmp_path_factory.mktemp("server"), model).start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def service(server: serving.Server) -> Iterator[tinker.ServiceClient]:
    """A client of the tenant ann, with one session."""
    client = tinker.ServiceClient(base_url=server.url, api_key=serving.ANN)
    yield client
    client.close("success").result()


@pytest.fixture(scope="session")
def rest(server: serving.Server) -> tinker.RestClient:
    """Records of the tenant ann."""
    return tinker.RestClient(base_url=server.url, api_key=serving.ANN)


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A new model of rank 4, with the same first adapters each time."""
    return service.create_lora_training_client(serving.MODEL, rank=4, seed=11).result()


@pytest.fixture
def export(rest: tinker.RestClient, tmp_path: Path) -> Callable[..., reference.Adapter]:
    """Saves a model's adapters in PEFT's form, and fetches the files without a key."""
    count = 0

    def fetch(trained: Any) -> reference.Adapter:
        nonlocal count
        count += 1
        saved = trained.save_weights_external(f"export-{count}").result()
        urls = rest.get_external_weights_urls(saved.path).result().urls
        folder = tmp_path / f"export-{count}"
        folder.mkdir()
        for name, url in urls.items():
            urllib.request.urlretrieve(url, folder / name)
        rest.delete_checkpoint_from_tinker_path(saved.path).result()
        return reference.Adapter(folder)

    return fetch
