"""The two ways to install it, pure and with the program, are the same package."""

from pathlib import Path

import pytest

import gradscale

tomllib = pytest.importorskip("tomllib", reason="Python before 3.11 reads no TOML")
HERE = Path(__file__).resolve().parents[1]


def read(path):
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this package")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def test_one_version_everywhere():
    assert read(HERE / "pyproject.toml")["project"]["version"] == gradscale.__version__
    assert read(HERE.parent / "Cargo.toml")["package"]["version"] == gradscale.__version__


def test_both_wheels_need_the_same_and_hold_the_same():
    pure, both = read(HERE / "pyproject.toml"), read(HERE / "wheel" / "pyproject.toml")
    assert both["project"]["name"] == pure["project"]["name"]
    assert both["project"]["requires-python"] == pure["project"]["requires-python"]
    assert both["project"]["optional-dependencies"]["torch"] == pure["project"]["optional-dependencies"]["torch"]
    packages = {".".join(p.parent.relative_to(HERE).parts) for p in (HERE / "gradscale").rglob("__init__.py")}
    assert set(pure["tool"]["setuptools"]["packages"]) == packages, "a subpackage is missing from the pure wheel"
    data = {p.name for p in (HERE / "gradscale").iterdir() if p.is_file() and p.suffix != ".py"}
    assert data == set(pure["tool"]["setuptools"]["package-data"]["gradscale"])
    included = {item["path"] for item in both["tool"]["maturin"]["include"]}
    assert {f"gradscale/{name}" for name in data} <= included
