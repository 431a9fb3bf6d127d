"""A model's own settings of cache-aware routing."""

from __future__ import annotations

import json

import pytest

from mlx_moe import MoceConfig, load_model
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.routing_settings import moce_settings
from mlx_moe.runtime import DEMO


@pytest.fixture
def folder(tmp_path):
    """A folder whose generation_config.json holds this as its moce."""

    def write(moce):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0} | moce))
        return tmp_path

    return write


def test_what_is_asked_for(folder, tmp_path):
    own = folder({"moce": {"bonus": 2, "max_rank": None}})
    assert moce_settings(own, None) is None and moce_settings(own, False) is None
    assert moce_settings(own, True) == MoceConfig(2, 3, None)
    assert moce_settings(own, {"keep_top": 1, "measure": True}) == MoceConfig(2, 1, None, True)
    assert moce_settings(own, MoceConfig(0.1)) == MoceConfig(0.1)
    assert moce_settings(folder({}), True) == MoceConfig()
    assert moce_settings(tmp_path / "m.gguf", True) == MoceConfig(), "a file has none of its own"


@pytest.mark.parametrize(
    ("moce", "message"),
    [
        (3, "moce is '3'; allowed: settings by name"),
        ({"bonus": -1}, "moce bonus is -1; allowed: 0 or more"),
        ({"bonus": "much"}, "moce bonus is much"),
        ({"cap": 8}, "moce has no setting 'cap'; allowed: bonus, keep_top, max_rank, measure"),
        ({"max_rank": 2.5}, "moce max_rank is 2.5; needed: a whole number"),
    ],
)
def test_own_settings_that_cannot_be(folder, moce, message):
    path = folder({"moce": moce})
    with pytest.raises(FileFormatError) as error:
        moce_settings(path, True)
    assert message in str(error.value) and "generation_config.json: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("asked", "message"), [("yes", "moce is 'yes'"), ({"cap": 1}, "moce has no setting 'cap'")])
def test_wishes_that_cannot_be(folder, asked, message):
    with pytest.raises(ValueError, match=message):
        moce_settings(folder({}), asked)


def test_the_demonstration_model_has_its_own(monkeypatch):
    """They are those that its table of settings gave (NOTES.md)."""
    with load_model(None, expert_slots=10, moce=True)[0] as model:
        assert model._experts._windows.moce == moce_settings(DEMO, True) == MoceConfig(3.0, 3, 16)
