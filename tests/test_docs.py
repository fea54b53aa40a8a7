"""What the documentation shows works as shown."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from fairseq_sg.modules.attention import ATTENTION_REGISTRY, build_attention
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY
from fairseq_sg.modules.update import UPDATE_REGISTRY

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_attention_of_extending_md(monkeypatch, tmp_path):
    code = re.search(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)[1]
    (tmp_path / "mean_attention.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("mean_attention")
        config = SimpleNamespace(
            encoder_embed_dim=8, encoder_attention_heads=2, mean_scale=2.0,
            attention_init="reference", attention_bias=False,
        )  # fmt: skip
        attention = build_attention("mean", config, "encoder")
        x = torch.randn(3, 2, 8)
        mask = torch.tensor([[False, False, True], [False, False, False]])
        expected = torch.stack([attention.v_proj(x[:2, 0]).mean(0), attention.v_proj(x[:, 1]).mean(0)])
        out = attention(x, key_padding_mask=mask)[0]
        torch.testing.assert_close(out[0], attention.out_proj(2 * expected))
    finally:
        ATTENTION_REGISTRY.pop("mean", None)
        sys.modules.pop("mean_attention", None)


def test_every_kind_has_its_row():
    text = {name: (DOCS / f"{name}.md").read_text() for name in ("attention", "feedforward")}
    pages = {
        "attention": (ATTENTION_REGISTRY, FEATURE_MAP_REGISTRY, POSITION_REGISTRY, UPDATE_REGISTRY, DEPTH_REGISTRY),
        "feedforward": (FEEDFORWARD_REGISTRY,),
    }
    for page, registry in ((page, registry) for page, registries in pages.items() for registry in registries):
        for name in registry:
            assert re.search(rf"^\| `{name}` (\(default\) )?\|", text[page], re.MULTILINE), (
                f"{page}.md has no row for {name}"
            )


def test_links_between_pages_lead_somewhere():
    root = DOCS.parent
    for page in [root / "README.md", root / "CONTRIBUTING.md", *DOCS.glob("*.md"), *(root / "results").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
