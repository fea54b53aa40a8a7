"""Recipes: strict reading; every shipped one parses, resolves and has its paper's numbers."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import ndr  # noqa: E402
import recipe  # noqa: E402
import reproduce  # noqa: E402
import verdicts  # noqa: E402
from runs import check_data  # noqa: E402

from data_prep.__main__ import DATASETS, make_parser  # noqa: E402
from data_prep.common import DataError  # noqa: E402

#: Recipes of papers; the others are our own, without published numbers.
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
    assert found.columns["IID"] == recipe.Column("valid", "accuracy", "end", ("short",))
    assert [list(found.columns_of(data)) for data in found.data] == [["IID", "OOD"], ["all"]]


SIZES = """\
title: A model in two sizes
source: Nobody 1999, Table 1
data:
  small: {folder: text, prepare: text --unit bytes --input FILE, subsets: [test], arguments: --batch-size 8 --lr 2}
  large: {folder: text, prepare: text --unit bytes --input FILE, subsets: [test], arguments: [--batch-size 9, --lr 3]}
steps: 100
validate_every: 10
batch_size_valid: 4
seeds: 1
unit: fraction
checkpoint: last
train: --task sg_language_modeling --lr 1
columns:
  ppl: {subset: test, metric: perplexity, data: [small]}
  bits: {subset: test, metric: loss, data: [large]}
rows:
  plain:
    arguments: --depth shared
    published:
      small: {ppl: "8.00"}
      large: {bits: "2.0"}
  fast:
    arguments: --lr 4
chosen: [all of it]
"""


def test_data_with_arguments_and_columns_of_their_own(tmp_path, capsys):
    """Two sizes of a model: one folder, with arguments between those of all rows and those of the row."""
    read(tmp_path, SIZES)
    args = reproduce.parse_arguments([str(tmp_path / "small.yaml"), "--device", "cpu", "--out", str(tmp_path)])
    trained = {(t.row, t.data): " ".join(t.run.train_command()) for t in args.trials}
    assert "--lr 1 --batch-size 8 --lr 2 --depth shared --batch-size-valid 4" in trained["plain", "small"]
    assert "--lr 1 --batch-size 9 --lr 3 --lr 4 --batch-size-valid 4" in trained["fast", "large"]
    assert [t.run.subsets for t in args.trials] == [{"test": "test"}] * 4
    reproduce.dry_run(args)
    assert capsys.readouterr().out.count("python -m data_prep text --unit bytes --input FILE --out") == 1

    result = {"steps": 100, "accuracy": {}, "loss": {"test": 3.0}, "generated": {}, "curve": []}
    records = [{"result": result}, {"result": result}, {}, {}]
    found = verdicts.lines(args.recipe, args.trials, records, 1.0)
    assert [list(line.cells) for line in found] == [["ppl"], ["bits"]] * 2
    assert verdicts.table(args.recipe, found)[1:3] == [
        ["plain", "small", "1 of 1", "100", "8.00", "8.00", "", "", "within one std"],
        ["plain", "large", "1 of 1", "100", "", "", "3.00", "2.0", "above"],
    ]
    legend = verdicts.legend(args.recipe)
    assert legend.startswith("ppl: perplexity per token on `test` of the last checkpoint; bits: loss in bits per token")
    assert ". Mean ± sample standard deviation over the seeds" in legend and "Accuracies" not in legend
    assert "the paper has 1 seed. " in legend


@pytest.mark.parametrize(
    "old,new,message",
    [
        (
            "arguments: --batch-size 8",
            "arguments: --seed 8",
            "data 'small', key 'arguments': has --seed, which scripts/",
        ),
        ("arguments: [--batch-size 9, --lr 3]", "arguments: 3", "data 'large', key 'arguments': must be text, or a"),
        ("loss, data: [large]", "loss, data: [lage]", "column 'bits', key 'data': names 'lage', which is not in"),
        ("loss, data: [large]", "loss, data: large", "column 'bits', key 'data': must be a list of texts, not 'large'"),
        ('large: {bits: "2.0"}', 'large: {ppl: "2.0"}', "on 'large', key 'ppl': is not a column of these data: bits"),
    ],
)
def test_what_is_wrong_in_data_with_arguments_is_named(old, new, message, tmp_path):
    assert SIZES.count(old) == 1
    with pytest.raises(recipe.RecipeError) as error:
        read(tmp_path, SIZES.replace(old, new))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("steps: 100\n", "", "the recipe, key 'steps': is missing"),
        ("steps: 100", "steps: many", "the recipe, key 'steps': must be a whole number, not 'many'"),
        ("steps: 100", "steps: true", "the recipe, key 'steps': must be a whole number, not True"),
        ("steps: 100", "steps: 0", "the recipe, key 'steps': is 0: it must be above 0"),
        ("steps: 100", "stepps: 100", "the recipe, key 'steps': is missing"),
        ("seeds: 5", "seeds: 5\nsteep: 1", "the recipe, key 'steep': is unknown"),
        ("seeds: 5", "seeds: 5\nstatistic: mode", "key 'statistic': is 'mode': choose from mean, median"),
        ("seeds: 5", "seeds: 5\nseeds: 6", "line 10: 'seeds' occurs twice"),
        ("  other:\n", "  plain:\n", "line 22: 'plain' occurs twice"),
        ("  plain:\n", "  22:\n", "line 18: the key 22 is not text: put it in quotes"),
        ("  plain:\n", "  a/b:\n", "key 'rows': has the name 'a/b'"),
        ("    label: another\n", "    lable: another\n", "row 'other', key 'lable': is unknown"),
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
        ("    arguments: --depth shared\n", "", "row 'plain', key 'arguments': is needed, or 'missing'"),
        (
            "    missing:",
            "    arguments: --x\n    missing:",
            "row 'other', key 'arguments': is needed, or 'missing'",
        ),
        ("--task sg_translation --arch", "--arch", "row 'plain', key 'arguments': have no --task, nor has 'train'"),
        ("data: [long]", "data: [longer]", "row 'other', key 'data': names 'longer', which is not in the data"),
        ("data: [long]", "data: long", "row 'other', key 'data': must be a list of texts, not 'long'"),
        ("data: [long]", "data: [short]", "row 'other', key 'published': has numbers on 'long', which the row is not"),
        ("{all: ", "{IID: ", "row 'other', published on 'long', key 'IID': is not a column of these data: all"),
        ('"46.9"', "46.9", "published on 'long', key 'all': must be text in quotes, as printed in the paper, not 46.9"),
        ('"46.9"', '"46,9"', "published on 'long', key 'all': is '46,9': it must be like '.21 ± .01'"),
        ("subset: test}", "subset: tset}", "column 'all', key 'subset': is 'tset', which no data has"),
        ("subset: test}", "subset: test, data: [short]}", "column 'all', key 'subset': is 'test', which no data has"),
        ("at: end", "at: 0", "column 'IID', key 'at': is 0: it must be a number of steps, 'checkpoint' or 'end'"),
        ("subset: gen}", "subset: gen, metric: bleu}", "key 'generate': is for a column with the metric 'bleu'"),
        ("at: end", "at: end, metric: bleu", "column 'IID', key 'at': BLEU is measured only at the checkpoint"),
        ("folder: short", "folder: a/b", "data 'short', key 'folder': is 'a/b': it must be the name of one folder"),
        ("length,", "length --out x,", "data 'short', key 'prepare': has --out, which scripts/reproduce.py sets"),
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
    """recipe -> row -> fairseq's reading of its training command."""
    from fairseq import options

    import fairseq_sg.plugin  # noqa: F401

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
    trainings = [(data.folder, data.arguments) for data in content.data.values()]
    assert len(set(trainings)) == len(trainings)


@pytest.mark.parametrize("name", recipe.names())
def test_a_folder_of_other_data_is_refused(name, tmp_path):
    """Each folder of a recipe is accepted unchanged, and refused with another number or name in its request."""
    for data in recipe.read(recipe.find(name)).data.values():
        arguments = shlex.split(data.prepare)
        args = make_parser().parse_args([*arguments, "--out", str(tmp_path)])
        (dataset,) = [one for one in DATASETS if one.name == arguments[0]]
        try:
            request = {"dataset": dataset.name, **dataset.request(args), "raw_only": False}
        except (DataError, OSError):  # needs a file
            given = {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float))}
            request = {"dataset": dataset.name, **given, "source_sha256": "of the file"}

        def check(changed):
            (tmp_path / "dataset.json").write_text(json.dumps({"request": request | changed}))
            check_data(tmp_path, arguments)

        check({})
        check({"raw_only": True} | ({"official_files": ["elsewhere"]} if "official_files" in request else {}))
        check({"dataset": "my own", "order": "another"})
        others = {"dataset": "scan" if request["dataset"] == "ctl" else "ctl"}
        for key in ("split", "cutoff", "order", "condition", "module", "variant", "holdout", "unit", "train"):
            if request.get(key) is not None:
                others[key] = request[key] + 1 if isinstance(request[key], (int, float)) else "other"
        for key, other in others.items():
            with pytest.raises(ValueError, match=f"the data in .* differ from .*: {key} {other} instead of "):
                check({key: other})


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


# Language models: their sizes are arguments of the data.

#: Millions of parameters that the thesis gives for each size.
MILLIONS = {"wt_s": 47, "wt_s_star": 238, "wt_b": 262, "e8": 41}
LANGUAGE_MODELS = [f"thesis_table_7_{number}" for number in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def language_models():
    """recipe -> (row, data) -> fairseq's reading of its training command, with the defaults of mechanisms."""
    pytest.importorskip("fairseq")
    from fairseq import options

    from fairseq_sg.models.sg_transformer_lm import configuration

    def parsed_run(trial):
        args = options.parse_args_and_arch(options.get_training_parser(), trial.run.train_command()[1:])
        return SimpleNamespace(**vars(configuration.dataclass()) | vars(args))

    return {
        name: {
            (trial.row, trial.data): parsed_run(trial)
            for trial in reproduce.parse_arguments([name, "--device", "cpu"]).trials
        }
        for name in LANGUAGE_MODELS
    }


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_every_language_model_is_built_with_the_parameters_of_the_thesis(name, language_models):
    """Within 1 %; the values of a product-key memory equal the parameters that its dense layers lack."""
    import torch
    from fairseq.data import Dictionary

    from fairseq_sg.models.sg_transformer_lm import SGTransformerLM

    dictionaries = {}
    for unit, words in (("subwords", 8000), ("bytes", 256)):
        dictionaries[unit] = Dictionary()
        for word in range(words):
            dictionaries[unit].add_symbol(str(word))
    for (row, data), args in language_models[name].items():
        task = SimpleNamespace(target_dictionary=dictionaries["bytes" if data == "e8" else "subwords"])
        with torch.device("meta"):
            model = SGTransformerLM.build_model(args, task)
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        if "-values" in row:
            assert parameters < 0.9 * MILLIONS[data]
        else:
            assert parameters == pytest.approx(MILLIONS[data], rel=0.01), (row, data)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_settings_of_language_models(name, language_models):
    found = language_models[name]
    content = recipe.read(recipe.find(name))
    assert (content.seeds, content.checkpoint, content.batch_size_valid) == (1, "last", 4)
    for (row, data), args in found.items():
        segment, batch = {"wt_b": (512, 64), "e8": (512, 32)}.get(data, (256, 64))
        assert args.arch == f"sg_transformer_lm_{data}"
        assert (args.tokens_per_sample, args.memory_length, args.eval_memory_length) == (segment, segment, 4 * segment)
        assert (args.batch_size, args.max_update, args.amp) == (batch, 100_000, True)
        assert (args.lr, args.lr_scheduler, args.min_lr) == ([2.5e-4], "cosine", 0)
        assert args.warmup_updates == (4000 if data == "wt_b" else 0)
        assert (args.optimizer, args.weight_decay) == ("torch_adam", 0)
        assert (args.decoder_attention, args.attention_scale) == ("relative", "learned") and args.attention_dropout == 0
        of_dense = args.decoder_ffn in ("dense", "topk") and data in ("wt_s", "wt_s_star")
        assert args.clip_norm == (0.1 if of_dense else 0.25), (row, data)
        assert content.data[data].folder == ("enwik8" if data == "e8" else "wikitext103_bpe8000")
        assert set(content.rows[row].published[data]) == {"bpc" if data == "e8" else "perplexity"}
    for data in content.data.values():
        assert ("--unit bytes" in data.prepare) == (data.folder == "enwik8")
    assert content.columns["bpc"].metric == "loss" and content.columns["bpc"].data == ("e8",)
    assert content.columns["perplexity"].metric == "perplexity"
    assert {column.subset for column in content.columns.values()} == {"test"}


def test_mixtures_of_experts_of_language_models(language_models):
    """Sizes, δ and γ (Table F.3, and where the released code differs, the code's); the code's effective γ of Switch."""

    def settings(name, row, data, *keys):
        args = language_models[name][row, data]
        return tuple(getattr(args, key) for key in keys)

    regularized = ("moe_expert_dropout", "moe_regularization")
    sizes = ("decoder_ffn_embed_dim", "moe_expert_dim", "moe_k")
    widths = {"wt_s": 2048, "wt_s_star": 16384, "wt_b": 4096, "e8": 2048}
    expected = {"wt_s": (0, 1e-4), "wt_s_star": (0.05, 1e-3), "wt_b": (0.1, 1e-3), "e8": (0.05, 1e-4)}
    for data, values in expected.items():
        width = widths[data]
        for row, dim, k in (("sigma_moe", 128, 4), ("k8-g64", 64, 8), ("k1-g512", 512, 1), ("s_base-g512", 512, 1)):
            assert settings("thesis_table_7_4", row, data, *sizes) == (width, dim, k)
        for row in ("sigma_moe", "softmax_after", "softmax_before", "standard_init", "k2-g256", "s_base"):
            assert settings("thesis_table_7_4", row, data, *regularized) == values
        assert settings("thesis_table_7_4", "no_reg", data, *regularized) == (0, 0)
        dropout = "dropout-wt_b" if data == "wt_b" else "dropout"
        assert settings("thesis_table_7_4", dropout, data, *regularized) == (0, values[1])
        assert settings("thesis_table_7_4", dropout, data, "moe_dropout") == (0.2 if data == "wt_b" else 0.1,)
        assert settings("thesis_table_7_3", f"sigma_moe-{data}", data, *sizes) == (width, 128, 4)
        gamma = 1e-3 if data == "wt_s" else values[1]
        assert settings("thesis_table_7_3", f"sigma_moe-{data}", data, *regularized) == (values[0], gamma)
    switches = 0
    for (row, data), args in language_models["thesis_table_7_4"].items():
        if row.startswith("switch"):
            experts = args.decoder_ffn_embed_dim // args.moe_expert_dim
            assert args.decoder_ffn == "switch" and args.moe_expert_dropout == 0
            assert args.moe_regularization == pytest.approx(0.01 / (experts**2 * args.moe_k), rel=1e-12)
            without = "no_dropout" in row or args.moe_k == 4
            assert args.moe_dropout == (0 if without else 0.2 if data == "wt_b" else 0.1), (row, data)
            switches += 1
        elif row.startswith("s_base"):
            assert (args.decoder_ffn, args.s_base_sinkhorn) == ("s_base", "released")
        else:
            assert args.decoder_ffn == "sigma_moe"
    assert switches == 17
    assert settings("thesis_table_7_4", "softmax_after", "e8", "moe_selection") == ("softmax_after_topk",)
    assert settings("thesis_table_7_4", "softmax_before", "e8", "moe_selection") == ("softmax_before_topk",)
    assert settings("thesis_table_7_4", "standard_init", "e8", "moe_init") == ("standard",)
    assert settings("thesis_table_7_1", "topk-64", "wt_s", "decoder_ffn", "topk_k") == ("topk", 64)


def test_product_key_memories_of_language_models(language_models):
    for (row, data), args in language_models["thesis_table_7_2"].items():
        if not row.startswith("dense"):
            small, large = (46, 64) if "-values" in row else (62, 89)
            assert args.decoder_ffn == "pkm" and args.decoder_ffn_embed_dim == (large if data == "wt_b" else small) ** 2
            assert args.pkm_activation == row.partition("-")[0] and (args.pkm_heads, args.pkm_k) == (4, None)
            assert args.pkm_init == ("dense_equivalent" if "-init" in row else "reference")


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
thesis_table_7_1 dense e8 bpc 1.08
thesis_table_7_1 topk-64 wt_s perplexity 11.86
thesis_table_7_1 topk-128 e8 bpc 1.07
thesis_table_7_1 topk-256 wt_b perplexity 9.34
thesis_table_7_1 topk-512 wt_s perplexity 11.68
thesis_table_7_2 softmax wt_s perplexity 13.96
thesis_table_7_2 relu-wt_b wt_b perplexity 9.98
thesis_table_7_2 relu-init wt_s perplexity 12.75
thesis_table_7_2 relu-values e8 bpc 1.12
thesis_table_7_2 softmax-values-wt_b wt_b perplexity 11.29
thesis_table_7_3 sigma_moe-wt_s wt_s perplexity 11.71
thesis_table_7_3 dense-wt_s wt_s_star perplexity 10.03
thesis_table_7_3 sigma_moe-wt_b wt_b perplexity 9.44
thesis_table_7_4 sigma_moe wt_s perplexity 11.59
thesis_table_7_4 dropout-wt_b wt_b perplexity 9.53
thesis_table_7_4 softmax_after wt_s_star perplexity 11.27
thesis_table_7_4 softmax_before wt_b perplexity 9.62
thesis_table_7_4 standard_init wt_s_star perplexity 10.59
thesis_table_7_4 no_reg wt_s perplexity 11.83
thesis_table_7_4 k8-g64 wt_s_star perplexity 10.30
thesis_table_7_4 k4-g64 wt_s_star perplexity 10.53
thesis_table_7_4 k1-g128 wt_s perplexity 12.26
thesis_table_7_4 k8-g128 wt_s_star perplexity 10.22
thesis_table_7_4 switch-g512 e8 bpc 1.08
thesis_table_7_4 switch-g512-no_dropout-wt_b wt_b perplexity 9.77
thesis_table_7_4 switch-k4-wt_s_star wt_s_star perplexity 11.37
thesis_table_7_4 switch-g128 e8 bpc 1.11
thesis_table_7_4 switch-g128-no_dropout wt_s perplexity 12.35
thesis_table_7_4 s_base wt_b perplexity 10.50
thesis_table_7_4 s_base-g512 e8 bpc 1.32
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
