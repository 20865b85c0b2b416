from __future__ import annotations

from pathlib import Path

import pytest

from megarl.families.shape import ModelShape
from tests.tiny_models import write_tiny_model
from tests.train.reference import Model


class Models:
    """Tiny models, written once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[tuple[str, bool, int], Model] = {}

    def get(self, family: str, *, tied: bool, seed: int = 0) -> Model:
        key = (family, tied, seed)
        if key not in self._models:
            folder = self._folder / f"{family}-{'tied' if tied else 'untied'}-{seed}"
            shape: ModelShape = write_tiny_model(folder, family, tied=tied, seed=seed)
            self._models[key] = Model(folder=folder, shape=shape)
        return self._models[key]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
