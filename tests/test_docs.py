"""What the documentation shows works as shown."""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import recipe, schema
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context, build_attention
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.norm import NORM_REGISTRY
from fairseq_sg.modules.normalization import QK_NORM_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY
from fairseq_sg.modules.update import UPDATE_REGISTRY

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: page -> the registries whose mechanisms have a row there, which ends with the paper
PAGES = {
    "attention": (
        ATTENTION_REGISTRY,
        FEATURE_MAP_REGISTRY,
        POSITION_REGISTRY,
        UPDATE_REGISTRY,
        DEPTH_REGISTRY,
        NORM_REGISTRY,
    ),
    "feedforward": (FEEDFORWARD_REGISTRY,),
}


def example(line: str) -> str:
    """The example of extending.md with such a line."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    return next(block for block in blocks if line in block)


def test_the_attention_of_extending_md(monkeypatch, tmp_path):
    code = example("class MeanAttention")
    assert "import fairseq_sg.plugin" in code  # so that the file can be a --user-dir
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
        out = attention(x, None, Context(key_padding_mask=mask)).output
        torch.testing.assert_close(out[0], attention.out_proj(2 * expected))
    finally:
        ATTENTION_REGISTRY.pop("mean", None)
        sys.modules.pop("mean_attention", None)
        for watcher in ATTENTION_REGISTRY.watchers:
            watcher()


def test_the_normalization_of_extending_md(monkeypatch, tmp_path):
    """Registered, its option is on the command line, in ``--help``, checked, and given to the module."""
    pytest.importorskip("fairseq")
    from fairseq_sg.models.sg_transformer import SGTransformer, resolve

    code = example("class PowerNormalization")
    assert "import fairseq_sg.plugin" in code  # so that the file can be a --user-dir
    (tmp_path / "power_normalization.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("power_normalization")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        SGTransformer.add_args(parser)
        assert "--qk-norm-power" in parser.format_help()
        linear = ["--encoder-attention", "linear"]
        chosen = [*linear, "--qk-norm", "power", "--qk-norm-power"]
        attention = build_attention("linear", resolve(parser.parse_args([*chosen, "3"])), "encoder")
        x = torch.rand(2, attention.feature_map.features)
        for norm in (attention.q_norm, attention.k_norm):
            torch.testing.assert_close(norm(x), x / (x.pow(3).sum(-1, keepdim=True).pow(1 / 3) + 1e-6))
        with pytest.raises(UsageError, match="--qk-norm-power is 0.0: choose a number above 0"):
            resolve(parser.parse_args([*chosen, "0"]))
        with pytest.raises(UsageError, match="--qk-norm-power 3.0 has no effect .* power query/key normalization"):
            resolve(parser.parse_args([*linear, "--qk-norm", "l2", "--qk-norm-power", "3"]))
    finally:
        QK_NORM_REGISTRY.pop("power", None)
        sys.modules.pop("power_normalization", None)
        for watcher in QK_NORM_REGISTRY.watchers:
            watcher()


def test_every_kind_has_its_row():
    for page, registries in PAGES.items():
        text = (DOCS / f"{page}.md").read_text()
        for name in (name for registry in registries for name in registry):
            assert re.search(rf"^\| `{name}` (\(default\) )?\|", text, re.MULTILINE), f"{page}.md: no row for {name}"


def test_the_page_of_options_is_what_the_command_makes():
    """After a change of an option: ``fairseq-sg options --markdown > docs/options.md``."""
    pytest.importorskip("fairseq")
    import fairseq_sg.plugin  # noqa: F401
    from fairseq_sg import options

    assert (DOCS / "options.md").read_text() == options.markdown()
    assert {owner.kind for owner in options.owners()} == set(options.CHAPTERS)


def test_papers_of_mechanisms_are_those_of_the_tables():
    for page, registries in PAGES.items():
        text = (DOCS / f"{page}.md").read_text()
        for name, cls in ((name, cls) for registry in registries for name, cls in registry.items()):
            rows = re.findall(rf"^\| `{name}` .*$", text, re.MULTILINE)  # `none` is a norm and a position
            assert not cls.paper or any(row.endswith(f"| {cls.paper} |") for row in rows), (
                f"{page}.md, {name}: not {cls.paper}"
            )


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: equal ones are numbered."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return set(found)


def test_links_between_pages_lead_somewhere():
    root = DOCS.parent
    pages = [*root.glob("*.md"), *DOCS.glob("*.md"), *(root / "results").glob("*.md"), *root.glob("benchmarks/**/*.md")]
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}, which is not there"
            if anchor and there.suffix == ".md":
                assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}, a heading that is not there"


def test_the_recipes_of_reproducing_md(tmp_path):
    page = (DOCS / "reproducing.md").read_text()
    own, extending = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my.yaml").write_text(own)
    (tmp_path / "sweep.yaml").write_text(extending)
    found = recipe.read(tmp_path / "my.yaml")
    assert found.trained == ["absolute", "relative"] and found.published("absolute", "scan26", "OOD").std == 0.01
    small = recipe.read(tmp_path / "my.yaml", "small")
    assert small.trained == ["relative"] and small.steps == 1000 and not small.has_published
    sweep = recipe.read(tmp_path / "sweep.yaml")
    assert sweep.trained == ["linear-l2", "weight-1e-4", "weight-1e-3"] and sweep.rows["weight-1e-4"].x == 1e-4
    assert sweep.arguments_of("weight-1e-4", "scan26")[-4:] == ["--qk-norm", "l2", "--orthogonality-weight", "1e-4"]
    assert sweep.published("linear-l2", "scan26", "OOD").mean == 50.6


def test_every_key_of_a_recipe_is_in_reproducing_md():
    guide = (DOCS / "reproducing.md").read_text().partition("## A recipe of your own")[2]
    kinds = (schema.Recipe, schema.Data, schema.Column, schema.Row, schema.XAxis, schema.ByLength)
    keys = {f.name for kind in kinds for f in fields(kind)} - {"name", "variant"} | {"extends", "variants"}
    assert [key for key in sorted(keys) if not re.search(rf"`{key}`|^ *{key}:|[{{ ]{key}: ", guide, re.MULTILINE)] == []


def test_numbers_of_trainings_in_reproducing_md():
    """A cell multiplies rows, data and seeds: "8 × 3", or "13, one seed"."""
    page = (DOCS / "reproducing.md").read_text()
    entries = re.findall(r"^\| `(\w+)(?: --variant (\w+))?`[^|]*\| ([^|]*\d[^|]*) \|", page, re.MULTILINE)
    found = [(recipe.read(recipe.find(name), variant), cell) for name, variant, cell in entries if name != "list"]
    assert len(found) > 50
    for table, cell in found:
        planned = sum(len(table.data_of(row)) for row in table.trained) * table.seeds
        assert math.prod(map(int, re.findall(r"\d+", cell))) == planned, table.full_name


def test_every_recipe_and_variant_is_in_reproducing_md():
    page = (DOCS / "reproducing.md").read_text()
    for name in recipe.names():
        for variant in recipe.variants(recipe.find(name)):
            assert f"`{name} --variant {variant}`" in page
        assert f"`{name}`" in page


# Plain English: short sentences and lines.

ROOT = DOCS.parent
MOST_WORDS, LONGEST_LINE = 35, 120
ABBREVIATIONS = re.compile(r"\b(al|eq|App|Fig|e\.g|i\.e|vs)\.")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, paragraph or item of a list) of a page, without code, tables and headings; code in a line is one word."""
    block: list[str] = []
    start, fenced, before_code = 0, False, True
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        code = fence or fenced or (line.startswith("    ") and before_code)
        ends = code or not line.strip() or line.startswith(("|", "#", "---", "!["))
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if block and (ends or item):
            yield start, re.sub(r"`[^`]*`", "CODE", " ".join(block))
            block = []
        if not ends:
            start = start if block else number
            block.append(line[item.end() :] if item else line.strip())
        before_code = code or not line.strip() or line.startswith("#")


def sentences(paragraph: str) -> list[str]:
    text = ABBREVIATIONS.sub(lambda found: found[0][:-1], re.sub(r"\]\([^)]*\)", "]", paragraph))
    return re.split(r"(?<=[.!?])[)*\"”]*\s+", text)


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def bounded_pages() -> list[str]:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    names = [page.relative_to(ROOT).as_posix() for page in (*pages, *sorted(DOCS.glob("*.md"))) if page.exists()]
    return list(names)


def test_sentences_are_counted():
    page = (
        "# A heading of many words\n\nOne two (Lake et al. 2018). Four `a b c`\nfive.\n\n    code code\n\n| a | b |\n"
    )
    assert [(line, [words(s) for s in sentences(text)]) for line, text in prose(page)] == [(3, [6, 3])]
    assert [line for line, _ in prose("- one\n  two\n- three\n\n```\ncode\n```\nfour\n")] == [1, 3, 8]


@pytest.mark.parametrize("name", bounded_pages())
def test_sentences_are_short(name):
    text = (ROOT / name).read_text()
    found = [(line, s) for line, paragraph in prose(text) for s in sentences(paragraph) if words(s) > MOST_WORDS]
    assert not found


@pytest.mark.parametrize("name", bounded_pages())
def test_lines_are_short(name):
    """Outside tables, pictures and code."""
    lines = (ROOT / name).read_text().splitlines()
    code, fenced = set(), False
    for number, line in enumerate(lines, start=1):
        fenced ^= line.startswith("```")
        if fenced or line.startswith(("    ", "|", "![")):
            code.add(number)
    assert not [n for n, line in enumerate(lines, start=1) if len(line) > LONGEST_LINE and n not in code]


def table_of(weights) -> str:
    """Weights of a construction as docs/constructions.md shows them."""

    def text(name: object) -> str:
        if isinstance(name, tuple):
            return f"head {name[0]}, {name[1]}"
        return "–" if name is None else f"unit {name}" if isinstance(name, int) else f"`{name}`"

    rows = [
        f"| {part} | {text(row)} | {text(column)} | {value if value == 'c' else format(value, 'g')} |"
        for part, row, column, value in weights
    ]
    return "\n".join(["| part | row | column | value |", "|---|---|---|---|", *rows]) + "\n"


def test_the_weights_of_constructions_md_are_those_of_the_models():
    pytest.importorskip("fairseq")
    from fairseq_sg.models import constructions

    text = (DOCS / "constructions.md").read_text()
    for name in ("parity", "first"):
        shown = re.search(rf"<!-- weights of {name} -->\n(.*?)<!-- end of weights -->", text, re.DOTALL)[1]
        weights = getattr(constructions, name.upper()).weights
        assert shown == table_of(weights), table_of(weights)
