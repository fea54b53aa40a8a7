"""Recipes: how strictly they are read; that every shipped one parses, resolves and has its paper's numbers."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import ndr  # noqa: E402
import recipe  # noqa: E402
import reproduce  # noqa: E402

#: Those of papers; the others are our own, without published numbers.
PUBLISHED = [name for name in recipe.names() if not name.startswith("own_")]

SMALL = """\
title: A small table
source: Nobody 1999, Table 0
data:
  short: {folder: short, prepare: scan --split length, subsets: [valid, gen]}
  long: {folder: long, prepare: scan --split simple, subsets: [test]}
steps: 100
validate_every: 10
batch_size_valid: 16
seeds: 5
unit: percent
checkpoint: last
train: --task sg_translation --arch sg_transformer_scan
columns:
  IID: {subset: valid, at: end}
  OOD: {subset: gen}
  all: {subset: test}
rows:
  plain:
    arguments: --depth shared
    published:
      short: {IID: "99.8 ± 0.1", OOD: Fail}
  other:
    label: another
    missing: it is of another paper
    data: [long]
    published:
      long: {all: "46.9"}
chosen: [the seeds]
"""


def read(tmp_path: Path, text: str) -> recipe.Recipe:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return recipe.read(path)


def test_a_recipe_is_read(tmp_path):
    found = read(tmp_path, SMALL)
    plain, other = found.rows["plain"], found.rows["other"]
    assert (found.name, found.seeds, found.statistic, found.generate) == ("small", 5, "mean", ())
    assert plain.arguments == ("--depth", "shared") and plain.on == ("short", "long") and plain.steps == 100
    assert plain.published["short"]["IID"] == recipe.Published("99.8 ± 0.1", 99.8, 0.1, 0.05)
    assert plain.published["short"]["OOD"].fail
    assert other.arguments is None and other.label == "another" and other.published["long"]["all"].std is None
    assert found.columns["IID"] == recipe.Column("valid", "accuracy", "end")


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("steps: 100\n", "", "the recipe, key 'steps': is missing"),
        ("steps: 100", "steps: many", "the recipe, key 'steps': must be a whole number, not 'many'"),
        ("steps: 100", "steps: true", "the recipe, key 'steps': must be a whole number, not True"),
        ("steps: 100", "steps: 0", "the recipe, key 'steps': is 0: it must be above 0"),
        ("steps: 100", "stepps: 100", "the recipe, key 'steps': is missing"),
        ("seeds: 5", "seeds: 5\nsteep: 1", "the recipe, key 'steep': is not known here"),
        ("seeds: 5", "seeds: 5\nstatistic: mode", "key 'statistic': is 'mode': choose from mean, median"),
        ("seeds: 5", "seeds: 5\nseeds: 6", "line 10: 'seeds' is there twice"),
        ("  other:\n", "  plain:\n", "line 22: 'plain' is there twice"),
        ("  plain:\n", "  22:\n", "line 18: the key 22 is no text: put it in quotes"),
        ("  plain:\n", "  a/b:\n", "key 'rows': has the name 'a/b'"),
        ("    label: another\n", "    lable: another\n", "row 'other', key 'lable': is not known here"),
        (
            "arguments: --depth shared",
            "arguments: 3",
            "row 'plain', key 'arguments': must be text, or a list of texts, not 3",
        ),
        (
            "arguments: --depth shared",
            "arguments: --seed 3",
            "row 'plain', key 'arguments': has --seed, which scripts/repr",
        ),
        (
            "arguments: --depth shared",
            "arguments: --aux '{",
            "row 'plain', key 'arguments': cannot be split into words",
        ),
        ("    arguments: --depth shared\n", "", "row 'plain', key 'arguments': must be there, or 'missing'"),
        (
            "    missing:",
            "    arguments: --x\n    missing:",
            "row 'other', key 'arguments': must be there, or 'missing'",
        ),
        ("--task sg_translation --arch", "--arch", "row 'plain', key 'arguments': name no --task, nor does 'train'"),
        ("data: [long]", "data: [longer]", "row 'other', key 'data': names 'longer', which is not among the data"),
        ("data: [long]", "data: long", "row 'other', key 'data': must be a list of texts, not 'long'"),
        ("data: [long]", "data: [short]", "row 'other', key 'published': has numbers on 'long', which the row is not"),
        ("{all: ", "{IID: ", "row 'other', published on 'long', key 'IID': is no column of these data: all"),
        ('"46.9"', "46.9", "published on 'long', key 'all': must be text in quotes, as printed in the paper, not 46.9"),
        ('"46.9"', '"46,9"', "published on 'long', key 'all': is '46,9': it must be like '.21 ± .01'"),
        ("subset: test}", "subset: tset}", "column 'all', key 'subset': is 'tset', which no data has"),
        ("at: end", "at: 0", "column 'IID', key 'at': is 0: it must be a number of steps, 'checkpoint' or 'end'"),
        ("subset: gen}", "subset: gen, metric: bleu}", "key 'generate': is for a column with the metric 'bleu'"),
        ("at: end", "at: end, metric: bleu", "column 'IID', key 'at': BLEU is measured at the checkpoint only"),
        ("folder: short", "folder: a/b", "data 'short', key 'folder': is 'a/b': it must be the name of one folder"),
        ("length,", "length --out x,", "data 'short', key 'prepare': has --out, which scripts/reproduce.py says"),
        ("chosen: [the seeds]", "chosen: []", "key 'chosen': must be a list of texts, not []"),
        ("title: A small table", "title: [", "while parsing a flow sequence"),
        (SMALL, "- a list\n", "the recipe: must be a mapping (key: value), not ['a list']"),
    ],
)
def test_what_is_wrong_is_named(old, new, message, tmp_path):
    assert SMALL.count(old) == 1 or old == "steps: 100"
    with pytest.raises(recipe.RecipeError) as error:
        read(tmp_path, SMALL.replace(old, new, 1))
    assert message in str(error.value) and "small.yaml: " in str(error.value)


def test_the_example_of_the_documentation(tmp_path):
    page = (REPOSITORY / "docs" / "reproducing.md").read_text()
    found = read(tmp_path, page.partition("```yaml\n")[2].partition("```")[0])
    assert (
        list(found.rows) == ["absolute", "relative"] and found.rows["absolute"].published["scan26"]["OOD"].std == 0.01
    )
    assert [name for name in PUBLISHED if f"`{name}`" not in page] == []


def test_an_unknown_recipe_is_answered_with_the_list():
    with pytest.raises(
        recipe.RecipeError, match="no recipe 'table_4': choose from .*park_kim_table_4, park_kim_table_5"
    ):
        recipe.find("table_4")


@pytest.fixture(scope="module")
def plans():
    """recipe -> row -> its first run."""
    pytest.importorskip("fairseq")
    found = {}
    for name in recipe.names():
        args = reproduce.parse_arguments([name, "--device", "cpu", "--seeds", "1"])
        found[name] = {trial.row: trial.run for trial in reversed(args.trials)}
    return found


@pytest.fixture(scope="module")
def parsed(plans):
    """recipe -> row -> what fairseq reads from its training command."""
    from fairseq import options

    import fairseq_sg  # noqa: F401

    return {
        name: {
            row: options.parse_args_and_arch(options.get_training_parser(), run.train_command()[1:])
            for row, run in rows.items()
        }
        for name, rows in plans.items()
    }


@pytest.mark.parametrize("name", recipe.names())
def test_every_row_is_a_model(name, plans, parsed):
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY
    from omegaconf import OmegaConf

    from fairseq_sg.models import sg_encoder, sg_transformer, sg_transformer_lm

    modules = {module.__name__.rpartition(".")[2]: module for module in (sg_encoder, sg_transformer, sg_transformer_lm)}
    content = recipe.read(recipe.find(name))
    assert set(parsed[name]) == {row for row, entry in content.rows.items() if entry.arguments is not None}
    for row, args in parsed[name].items():
        model = ARCH_MODEL_NAME_REGISTRY[args.arch]
        if model in modules:
            modules[model].resolve(OmegaConf.create(vars(args)))
        else:
            assert model == "sg_lstm" and args.no_source_bos
        assert args.task == plans[name][row].task and args.max_update == content.rows[row].steps
        weights = json.loads(args.aux_loss_weights)
        assert weights == ({"ponder": 0.03} if getattr(args, "depth", "") == "shared_act" else {})


@pytest.mark.parametrize("name", recipe.names())
def test_every_dataset_is_one_of_data_prep(name):
    from data_prep.__main__ import make_parser

    content = recipe.read(recipe.find(name))
    for data in content.data.values():
        make_parser().parse_args([*shlex.split(data.prepare), "--out", data.folder])
        assert data.needs_file == (data.prepare.split()[0] in ("cfq", "mathematics", "text"))
    folders = [data.folder for data in content.data.values()]
    assert len(set(folders)) == len(folders)


def test_a_folder_holds_the_same_data_in_every_recipe():
    known = {}
    for name in recipe.names():
        for data in recipe.read(recipe.find(name)).data.values():
            assert known.setdefault(data.folder, data.prepare) == data.prepare


@pytest.mark.parametrize(
    "dataset,name",
    [
        ("ctl", "thesis_table_5_1"),
        ("arithmetic", "thesis_table_5_3"),
        ("listops", "thesis_table_5_4"),
        ("ctlpp", "thesis_table_6_1"),
    ],
)
def test_the_settings_are_those_of_ndr_py(dataset, name, plans, parsed, monkeypatch):
    from fairseq import options

    monkeypatch.setattr(sys, "argv", ["ndr.py", dataset, "--device", "cpu"])
    args = ndr.parse_arguments()
    runs = {run.name: run for run in ndr.make_runs(args)}
    for row, planned in plans[name].items():
        run = runs[row]
        other = options.parse_args_and_arch(options.get_training_parser(), run.train_command()[1:])
        expected, found = vars(other), vars(parsed[name][row])
        differing = {key for key in expected if expected[key] != found[key]}
        assert differing <= {"data", "save_dir"}, f"{row}: {differing}"
        ends = [c[c.index("--batch-size") :] for c in (run.validate_command(), planned.validate_command())]
        assert ends[0] == ends[1] and run.best == planned.best and list(run.subsets) == list(planned.subsets)


#: recipe, row, data, column, number; some of every table
SENTINELS = """\
park_kim_table_4 linear scan26 OOD 46.9 ± 8.9
park_kim_table_4 linear-l2-orthogonality scan26 OOD 56.3 ± 5.4
park_kim_table_4 linear-l1-orthogonality scan26 OOD 44.9 ± 4.1
park_kim_table_4 transformer scan26 OOD 21.0 ± 1.0
park_kim_table_5 linear-orthogonality add_or_sub OOD 64.3 ± 0.3
park_kim_table_5 linear-l2 add_or_sub IID 88.0 ± 0.9
park_kim_table_6 linear-rms-orthogonality place_value OOD Fail
park_kim_table_6 linear-l1 place_value OOD 21.6 ± 3.5
park_kim_table_7 linear systematicity accuracy Fail
park_kim_table_7 linear-l1-orthogonality systematicity accuracy 58.4 ± 2.1
thesis_table_4_1 relative 26 OOD 0.61
thesis_table_4_1 relative 32 OOD 0.94
thesis_table_4_1 universal 32 OOD 0.35
thesis_table_4_1 relative-universal 25 OOD 0.71
thesis_table_4_1 reference-oracle 40 OOD 1.00
thesis_table_c4_scan relative scan26 OOD 0.72 ± 0.21
thesis_table_c4_scan universal-nos scan26 OOD 0.14 ± 0.05
thesis_table_c4_cfq universal-ped length OOD 0.60 ± 0.34
thesis_table_c4_cfq standard-nos mcd1 OOD 0.40 ± 0.01
thesis_table_c6 relative-universal-small length OOD 0.70 ± 0.03
thesis_table_c6 relative-small mcd1 OOD 0.32 ± 0.01
thesis_table_c5_pcfg standard-teu productivity OOD 0.47 ± 0.27
thesis_table_c5_pcfg standard-teu iid IID 0.92 ± 0.07
thesis_table_c5_pcfg relative-universal systematicity OOD 0.96 ± 0.01
thesis_table_c5_cogs standard-nos cogs OOD 0.62 ± 0.06
thesis_table_c5_cogs relative cogs OOD 0.81 ± 0.01
thesis_table_c5_math relative-universal place_value OOD 0.75 ± 0.10
thesis_table_c5_math standard-nos place_value IID 0.8 ± 0.5
thesis_table_5_1 relative_gate backward Longer 0.19 ± 0.04
thesis_table_5_1 absolute backward IID 0.82 ± 0.39
thesis_table_5_1 dnc backward Longer 0.18 ± 0.02
thesis_table_5_2 layers-10 backward Test 0.62 ± 0.05
thesis_table_5_3 abs_rel_gate arithmetic Test-50k 0.73 ± 0.15
thesis_table_5_3 bilstm arithmetic Test 0.82 ± 0.06
thesis_table_5_4 ndr listops Test 0.99 ± 0.01
thesis_table_5_4 bilstm listops Test 0.57 ± 0.04
thesis_table_6_1 ndr R OOD 0.75 ± 0.27
thesis_table_6_1 bilstm A OOD 0.95 ± 0.03
thesis_figure_6_4 ndr o16-s6 OOD 1.00
thesis_table_d1 relative_gate-first backward Longer 1.00 ± 0.00
thesis_table_d2 relative-act-u forward Longer-30k 0.67 ± 0.41
thesis_table_d2 geometric-act-a backward Longer-60k 0.45 ± 0.21
"""


def test_published_numbers():
    seen = set()
    for line in SENTINELS.splitlines():
        name, row, data, column, number = line.split(" ", 4)
        assert recipe.read(recipe.find(name)).rows[row].published[data][column].text == number, line
        seen.add(name)
    assert seen == set(PUBLISHED)


def test_sizes_and_optimization_of_the_papers(parsed):
    defaults = {"qk_norm": "none", "orthogonality_weight": 0}

    def settings(name, row, *keys):
        return tuple(getattr(parsed[name][row], key, defaults.get(key)) for key in keys)

    common = ("lr", "batch_size", "max_update", "clip_norm")
    assert settings("park_kim_table_4", "linear-l2", *common) == ([1e-3], 256, 50_000, 5)
    assert settings("park_kim_table_7", "linear-l2", *common) == ([1e-4], 64, 300_000, 1)
    assert settings("thesis_table_c5_cogs", "relative", *common) == ([1e-4], 128, 50_000, 1)
    assert settings("thesis_table_c5_math", "relative", *common) == ([1e-4], 256, 50_000, 0.1)
    for row, lr, warmup, d in (("standard-ped", 0.9, 4000, 128), ("universal-ped", 2.24, 8000, 256)):
        # Noam's peak, lr/√(d · warm-up)
        assert settings("thesis_table_c4_cfq", row, "lr")[0] == [pytest.approx(lr / (d * warmup) ** 0.5, rel=1e-5)]
        assert settings("thesis_table_c4_cfq", row, "lr_scheduler", "warmup_updates") == ("inverse_sqrt", warmup)
    for row, norm, weight in (("linear", "none", 0), ("linear-rms", "rms", 0), ("linear-l1-orthogonality", "l1", 1e-4)):
        for table in (4, 5, 6, 7):
            name = f"park_kim_table_{table}"
            assert settings(name, row, "qk_norm", "orthogonality_weight", "depth") == (norm, weight, "shared")
            assert settings(name, row, "encoder_attention", "cross_attention") == ("linear", "linear")
