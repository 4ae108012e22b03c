"""The maps in CONTRIBUTING equal the contracts of import-linter, and its tables list every package."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = {contract["containers"][0]: contract["layers"] for contract in CONTRACTS if contract["type"] == "layers"}


def drawn(layers: list[str]) -> str:
    names = [re.findall(r"\w+", layer) for layer in layers]
    return " -> ".join(group[0] if len(group) == 1 else f"{{{' '.join(group)}}}" for group in names)


@pytest.mark.parametrize("container", LAYERS)
def test_the_map_is_the_contract(container: str) -> None:
    assert f"`{drawn(LAYERS[container])}`" in " ".join(TEXT.split())


@pytest.mark.parametrize("container", LAYERS)
def test_every_package_is_in_the_contract_and_has_a_row(container: str) -> None:
    folder = ROOT / "src" / Path(*container.split("."))
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert packages <= set(re.findall(r"\w+", " ".join(LAYERS[container])))
    rows = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `")]
    assert packages <= set(re.findall(r"`(\w+)`", " ".join(rows)))
