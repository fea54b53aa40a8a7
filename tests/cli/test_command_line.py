"""Mistakes in the options of fairseq's commands: each is one line, before anything is loaded. The lists of options."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from helpers.commands import launch, run, training

FOLDER = "no/data"  # none of these commands gets as far as its data


def words(*more: str, without: tuple[str, ...] = ()) -> list[str]:
    """A training's arguments, without some of its options and their values."""
    given = training(Path(FOLDER), Path("no/checkpoints"), *more)
    dropped = {i + step for i, word in enumerate(given) if word in without for step in (0, 1)}
    return [word for i, word in enumerate(given) if i not in dropped]


def assert_one_line(result, message: str, code: int) -> None:
    printed = result.out + result.err
    assert printed == f"error: {message}\n" and result.code == code


MISTAKES = {
    "option": (
        ["--encoder-atention", "linear"],
        "there is no option --encoder-atention: did you mean --encoder-attention or --decoder-attention or "
        "--encoder-attention-heads?",
    ),
    "underscore": (["--qk_norm=l2"], "there is no option --qk_norm: did you mean --qk-norm or --norm?"),
    "arch": (
        ["--arch", "sg_transformer_scn"],
        "--arch is 'sg_transformer_scn': did you mean sg_transformer_scan or sg_transformer_cfq or sg_transformer?",
    ),
    "criterion": (
        ["--criterion", "cross_entropy_orthogonalty"],
        "--criterion is 'cross_entropy_orthogonalty': did you mean cross_entropy_orthogonality?",
    ),
    "task": (
        ["--task", "sg_translaton"],
        "--task is 'sg_translaton': did you mean sg_translation or translation or translation_lev?",
    ),
    "optimizer": (["--optimizer", "torch-adam"], "--optimizer is 'torch-adam': did you mean torch_adam?"),
    "scheduler": (["--lr-scheduler", "fix"], "--lr-scheduler is 'fix': did you mean fixed?"),
    "no-value": (["--lr"], "--lr: expected one argument"),
    "whole-number": (["--encoder-layers", "three"], "--encoder-layers is 'three': choose a whole number"),
    "numbers": (["--lr", "(("], "--lr is '((': choose numbers, such as 1 or 1,2"),
    "of-another-arch": (
        ["--arch", "transformer", "--qk-norm", "l2"],
        "--qk-norm has no effect here: it is an option of --arch sg_encoder, sg_operator, sg_regressor",
    ),
    "of-another-task": (
        ["--memory-length", "4"],
        "--memory-length has no effect here: it is an option of --task sg_language_modeling",
    ),
    "of-another-command": (["--beam", "5"], "--beam has no effect here: it is an option of fairseq-generate"),
    "stray": (["stray"], "'stray' belongs to no option"),
    "removed": (
        ["--copy-gate-bias", "0"],
        "--copy-gate-bias was removed: the copy gate's last bias starts at −3; leave it out",
    ),
    "removed-of-a-criterion": (
        ["--orthogonality-padding=exclude"],
        "--orthogonality-padding was removed: the orthogonality loss leaves out padding; leave it out",
    ),
}


@pytest.mark.parametrize("options,message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(options, message):
    assert_one_line(run("fairseq-train", *words(*options)), message, 2)


def test_a_model_that_needs_an_option_of_another_task():
    given = "--user-dir fairseq_sg --task sg_language_modeling --arch transformer_lm --optimizer adam".split()
    message = (
        "--arch transformer_lm takes --add-bos-token from the task, and --task sg_language_modeling does not have "
        "it: choose another --arch, or another --task"
    )
    assert_one_line(run("fairseq-train", FOLDER, *given), message, 2)


def test_what_must_be_given(tmp_path):
    missing = {"--arch": "sg_transformer", "--optimizer": "torch_adam"}
    for option, example in missing.items():
        result = run("fairseq-train", *words(without=(option,)))
        assert result.out + result.err == f"error: {option} is missing: give one, such as {example}\n"
    message = "a batch has no size: give --batch-size (sentences) or --max-tokens"
    unsized = words("--save-dir", str(tmp_path / "none"), without=("--batch-size", "--batch-size-valid"))
    assert_one_line(run("fairseq-train", *unsized), message, 1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "command,more,message",
    [
        ("validate", [], "there is no checkpoint no.pt: check --path"),
        ("generate", ["--task", "sg_translation", "--bem", "2"], "there is no option --bem: did you mean --beam .*"),
        ("generate", ["--task", "sg_translation", "--beam", "0"], "--beam is 0: choose 1 or more"),
        ("interactive", ["--task", "sg_translaton"], "--task is 'sg_translaton': did you mean sg_translation .*"),
        (
            "interactive",
            ["--task", "sg_translation", "--qk-norm", "l2"],
            "--qk-norm is an option of a training, with --arch sg_encoder, .*: a checkpoint keeps what it was .*",
        ),
        ("validate", ["--path", "one.pt:two.pt"], "this command evaluates one checkpoint: .* one.pt, two.pt"),
    ],
)
def test_other_commands(command, more, message):
    result = run(f"fairseq-{command}", FOLDER, "--user-dir", "fairseq_sg", "--path", "no.pt", *more)
    assert result.code != 0 and re.fullmatch(f"error: {message}\n", result.out + result.err), result


def configured(*more: str):
    """fairseq's whole configuration of a training, as its command makes it."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import fairseq_sg.plugin  # noqa: F401

    parsed = options.parse_args_and_arch(options.get_training_parser(), words(*more))
    return convert_namespace_to_omegaconf(parsed)


def test_a_polynomial_decay_takes_the_updates_of_the_training():
    """fairseq's own default, with which its command ends in an error of hydra's."""
    assert configured("--lr-scheduler", "polynomial_decay", "--max-update", "9").lr_scheduler.total_num_update == 9
    result = run("fairseq-train", *words("--lr-scheduler", "polynomial_decay"))
    assert_one_line(result, "--lr-scheduler polynomial_decay needs the number of updates: give --max-update", 2)


VALUES = {
    "--orthogonality-weight -1": "--orthogonality-weight is -1.0: choose 0 or more",
    "--label-smoothing 1.5": "--label-smoothing is 1.5: choose a number from 0 to below 1",
    '--aux-loss-weights {"ponder":-1}': '--aux-loss-weights is {"ponder":-1}: choose 0 or more',
    "--dropout -0.1": "--dropout is -0.1: choose a number from 0 to 1",
    "--activation-dropout nan": "--activation-dropout is nan: choose a number from 0 to 1",
    "--encoder-layers 0": "--encoder-layers is 0: choose 1 or more",
    "--copy-gate-dropout nan": "--copy-gate-dropout is nan: choose a number from 0 to below 1",
    "--weight-decay -1": "--weight-decay is -1.0: choose 0 or more",
    "--adam-eps 0": "--adam-eps is 0.0: choose a number above 0",
    "--adam-beta1 1.5": "--adam-beta1 is 1.5: choose a number from 0 to below 1",
    "--adam-betas (0.9,1.5)": "--adam-betas is (0.9,1.5): choose a number from 0 to below 1",
    "--adam-betas 0.9": "--adam-betas is '0.9': choose two numbers, such as '(0.9, 0.98)'",
    "--adam-betas (0.9,0.98) --adam-beta2 0.99": "--adam-beta2 is 0.99, and --adam-betas is (0.9,0.98): leave one "
    "of the two out",
    "--lr -1": "--lr is [-1.0]: choose 0 or more",
    "--clip-norm -1": "--clip-norm is -1.0: choose 0 or more",
    "--clip-norm nan": "--clip-norm is nan: choose 0 or more",
    "--max-update -5": "--max-update is -5: choose 0 or more",
    "--max-epoch -5": "--max-epoch is -5: choose 0 or more",
    "--batch-size 0": "--batch-size is 0: choose 1 or more",
    "--validate-interval 0": "--validate-interval is 0: choose 1 or more",
    "--save-interval 0": "--save-interval is 0: choose 1 or more",
    "--batch-size-valid -3": "--batch-size-valid is -3: choose 1 or more",
    "--max-tokens 0": "--max-tokens is 0: choose 1 or more",
    "--update-freq 1,0": "--update-freq is [1, 0]: choose 1 or more",
    "--warmup-updates -5": "--warmup-updates is -5: choose 0 or more",
    "--lr-scheduler inverse_sqrt --warmup-updates 0": "--warmup-updates is 0: choose 1 or more",
    "--lr-scheduler polynomial_decay --total-num-update 0": "--total-num-update is 0.0: choose a number above 0",
    "--lr-scheduler cosine": "--lr-scheduler cosine needs the number of updates: give --max-update",
    "--lr-scheduler one_cycle": "--lr-scheduler one_cycle needs the number of updates: give --max-update",
    "--lr-scheduler one_cycle --max-update 9 --lr 0.1,0.2": "--lr-scheduler one_cycle has one peak, and --lr is [0.1, "
    "0.2]: give one",
    "--lr-scheduler tri_stage --phase-ratio (0.1,0.4,0.5)": "--lr-scheduler tri_stage needs the number of updates: "
    "give --max-update",
    "--lr-scheduler tri_stage --phase-ratio (0.5,0.25,0) --max-update 9": "--phase-ratio is [0.5, 0.25, 0.0], whose "
    "sum is 0.75 and not 1: change it, or give --warmup-steps, --hold-steps and --decay-steps",
    "--lr-scheduler tri_stage --phase-ratio (0.1,0.4,0.5) --warmup-steps 5 --max-update 9": "--phase-ratio and "
    "--warmup-steps both give the lengths of the phases: leave one of them out",
    "--lr-scheduler tri_stage --phase-ratio (0.5,0.5,0) --max-update 9": "--phase-ratio is [0.5, 0.5, 0.0], and leaves "
    "no update to the decay: choose a larger last number",
    "--lr-scheduler tri_stage --phase-ratio 0.5,0.5 --max-update 9": "--phase-ratio is [0.5, 0.5]: give three numbers, "
    "those of the warm-up, the hold and the decay",
    "--lr-scheduler tri_stage --phase-ratio (0.5,0.25,0.25,1) --max-update 9": "--phase-ratio is [0.5, 0.25, 0.25, "
    "1.0]: give three numbers, those of the warm-up, the hold and the decay",
    "--lr-scheduler tri_stage --phase-ratio (0.5,-0.5,1) --max-update 9": "--phase-ratio is [0.5, -0.5, 1.0]: choose 0 "
    "or more",
    "--lr-scheduler tri_stage": "--lr-scheduler tri_stage needs the lengths of its phases: give --decay-steps",
    "--lr-scheduler tri_stage --warmup-steps 100 --hold-steps 200": "--lr-scheduler tri_stage needs the lengths of its "
    "phases: give --decay-steps",
    "--lr-scheduler tri_stage --decay-steps 9 --final-lr-scale 0": "--final-lr-scale is 0.0: choose a number above 0",
    "--lr-scheduler tri_stage --decay-steps 9 --hold-steps -1": "--hold-steps is -1: choose 0 or more",
    "--lr-scheduler step --lr 0.1 --min-lr 0.1": "--min-lr is 0.1, and --lr 0.1 decays to it: choose less than --lr",
    "--lr-scheduler step --min-lr -1": "--min-lr is -1.0: choose 0 or more",
    "--lr-scheduler step --lr-decay 2": "--lr-decay is 2.0: choose a number from 0 to 1",
    "--lr-scheduler step --lr-deacy-period 0": "--lr-deacy-period is 0: choose 1 or more",
    "--lr-scheduler triangular --lr 0.1 --max-lr 0.1": "--max-lr is 0.1, and --lr 0.1 rises to it: choose more than "
    "--lr",
    "--lr-scheduler triangular --max-lr 1 --lr-period-updates 1": "--lr-period-updates is 1.0: choose 2 or more",
    "--lr-scheduler inverse_sqrt --warmup-updates 4 --lr 0.1,0.2": "--lr-scheduler inverse_sqrt has one rate, and --lr "
    "is [0.1, 0.2]: give one",
    "--lr-scheduler cosine --warmup-updates 9 --max-update 9": "--warmup-updates 9 leaves no update of --max-update 9 "
    "to the cosine: choose less",
    "--lr-scheduler reduce_lr_on_plateau --validate-interval 9": "--lr-scheduler reduce_lr_on_plateau looks only at "
    "validations at the end of an epoch: leave --validate-interval and --disable-validation out, or choose another "
    "schedule",
    "--distributed-world-size 2": "without a GPU, fairseq starts no processes: leave --distributed-world-size and "
    "--distributed-init-method out, or run `python -m fairseq_sg.experiments.workers N fairseq-train …`",
    "--lr-shrink -2": "--lr-shrink is -2.0: choose a number above 0",
    "--seed -1": "--seed is -1: choose 0 or more",
    "--num-workers -1": "--num-workers is -1: choose 0 or more",
    "--log-interval 0": "--log-interval is 0: choose 1 or more",
    "--required-batch-size-multiple 0": "--required-batch-size-multiple is 0: choose 1 or more",
    "--distributed-world-size 0": "--distributed-world-size is 0: choose 1 or more",
    "--max-source-positions 0": "--max-source-positions is 0: choose 1 or more",
    "--write-checkpoints-asynchronously": "--write-checkpoints-asynchronously needs iopath, and fairseq trains nothing "
    "without it: pip install iopath, or leave the option out",
    "--valid-subset valid,gen --combine-valid-subsets": "--combine-valid-subsets makes one subset, valid, of valid, "
    "valid1 and so on, and --valid-subset is valid,gen: leave one of the two out",
    "--valid-subset valid,train": "--valid-subset has train, whose log lines would look like those of the training: "
    "leave it out, and run fairseq-validate --valid-subset train on a checkpoint",
    "--train-subset gen --valid-subset valid,train": "--valid-subset has train, whose log lines would look like those "
    "of the training: leave it out, and run fairseq-validate --valid-subset train on a checkpoint",
    "--profile": "--profile measures a GPU, and there is none: leave it out",
    "--patience 3 --disable-validation": "--patience counts validations, and --disable-validation leaves them out: "
    "give one of the two",
    "--num-shards 2 --shard-id 1": "--num-shards and --shard-id split an evaluation, and a training ignores them: "
    "leave them out",
    "--patience -5": "--patience is -5: choose -1 or more",
    "--log-file no/folder/log": "--log-file no/folder/log: there is no folder no/folder: make it first",
}


@pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")
@pytest.mark.parametrize("options,message", VALUES.items(), ids=VALUES)
def test_values_that_cannot_be_meant(options, message, monkeypatch):
    from fairseq_sg import checks
    from fairseq_sg.errors import UsageError

    cfg = configured(*options.split())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError) as error:
        checks.check(cfg, "train")
    assert str(error.value) == message


def test_a_command_that_runs_by_its_path():
    """As a debugger or a profiler runs it."""
    from fairseq_cli import train

    result = launch("python", train.__file__, *words("--patience", "-5"))
    assert (result.code, result.err.splitlines()[-1]) == (1, "error: --patience is -5: choose -1 or more")


@pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")
def test_a_training_on_a_cpu_starts_no_process_for_each_gpu(monkeypatch, tmp_path):
    """fairseq's default is the number of GPUs."""
    from fairseq_cli import train

    from fairseq_sg import command_line
    from fairseq_sg.errors import UsageError

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setitem(vars(train), "__spec__", importlib.util.find_spec("fairseq_cli.train"))

    def processes(given: int, on_cpu: bool, *more: str) -> int:
        cfg = configured("--save-dir", str(tmp_path), "--distributed-world-size", str(given), *more)
        cfg.common.cpu = on_cpu
        return command_line._call_main(lambda cfg, _: cfg.distributed_training.distributed_world_size, cfg, train.main)

    assert processes(2, on_cpu=True) == 1 and processes(2, on_cpu=False) == 2
    # As ``experiments.workers`` starts them.
    assert processes(2, True, "--distributed-no-spawn", "--distributed-init-method", "tcp://127.0.0.1:1") == 2
    with pytest.raises(UsageError, match="^without a GPU, fairseq starts no processes"):
        processes(3, on_cpu=True)


@pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")
def test_processes_of_torchrun_train_one_model(monkeypatch, tmp_path):
    from fairseq_sg import checks
    from fairseq_sg.errors import UsageError

    one = ("--save-dir", str(tmp_path), "--distributed-world-size", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    checks.check(configured(*one), "train")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="^torchrun started 2 processes, .* give --distributed-world-size 2, or "):
        checks.check(configured(*one), "train")
    checks.check(configured(*one), "validate")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    two = (*one[:-1], "2")
    with pytest.raises(UsageError, match=r"^torchrun does not give .* run `python -m fairseq_sg\.\S+\.workers 2 fair"):
        checks.check(configured(*two), "train")
    checks.check(configured(*two, "--distributed-no-spawn"), "train")


def test_a_value_is_refused_before_data_are_loaded():
    message = "--orthogonality-weight is -1.0: choose 0 or more"
    assert_one_line(run("fairseq-train", *words("--orthogonality-weight", "-1")), message, 1)


@pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")
def test_every_default_is_inside_its_range(tmp_path):
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    from fairseq_sg import checks, ranges

    for arch in (
        "sg_transformer",
        "sg_encoder",
        "sg_transformer_lm",
        "sg_lstm",
        "sg_dnc",
        "sg_regressor",
        "sg_operator",
    ):
        config = MODEL_DATACLASS_REGISTRY[arch]
        ranges.check(config, config.declared)
    for scheduler in (
        *("fixed", "inverse_sqrt", "cosine", "reduce_lr_on_plateau", "step"),
        *("tri_stage --decay-steps 9", "tri_stage --phase-ratio (0.5,0.25,0.25)", "triangular --max-lr 1"),
        "cosine --lr-period-updates 1",
    ):
        given = ("--lr-scheduler", *scheduler.split(), "--max-update", "9", "--save-dir", str(tmp_path))
        checks.check(configured(*given), "train")


#: Options of fairseq's translation that our tasks refuse, whatever their value.
REFUSED = {"--load-alignments", "--truncate-source", "--num-batch-buckets"}


def plugin_options() -> set[str]:
    """The flags of every dataclass that the plugin registers, without those that are refused."""
    from fairseq.models import MODEL_DATACLASS_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    import fairseq_sg.plugin  # noqa: F401

    registries = [MODEL_DATACLASS_REGISTRY, TASK_DATACLASS_REGISTRY]
    registries += [registry["dataclass_registry"] for registry in REGISTRIES.values()]
    own = [cls for r in registries for cls in r.values() if cls and cls.__module__.startswith("fairseq_sg")]
    own += [cls for name, cls in MODEL_DATACLASS_REGISTRY.items() if name.startswith("sg_")]
    return {
        "--" + f.name.replace("_", "-")
        for cls in own
        for f in dataclasses.fields(cls)
        if f.metadata.get("help") and f.name not in ("_name", "data")
    } - REFUSED


def test_help_shows_every_option_of_the_plugin_by_mechanism():
    result = run("fairseq-train", FOLDER, "--user-dir", "fairseq_sg", "--arch", "sg_transformer_scan", "--help")
    assert result.code == 0 and not result.err
    expected = plugin_options()
    assert len(expected) > 110 and not expected - set(re.findall(r"^  (--\S+)$", result.out, re.MULTILINE))
    linear = result.out.partition("\nattention linear\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^  (--\S+)", linear, re.MULTILINE)) == {
        "--feature-map", "--feature-dim", "--qk-norm", "--linear-attention-eps", "--linear-attention-denominator",
    }  # fmt: skip
    assert "default: 128, the one of sg_transformer_scan" in result.out
    own, _, fairseqs = result.out.partition("\nfairseq's own\n")
    assert "--clip-norm" in fairseqs and "--clip-norm" not in own


def test_help_of_other_commands_and_architectures_is_fairseq_s():
    result = run("fairseq-train", "--user-dir", "fairseq_sg", "--arch", "transformer", "--help")
    assert result.code == 0 and "--feature-map" not in result.out and "--clip-norm" in result.out
    result = run("fairseq-generate", "--user-dir", "fairseq_sg", "--task", "sg_translation", "-h")
    assert result.code == 0 and "--beam" in result.out and "--accuracy-by" in result.out


def listed(*arguments: str) -> tuple[int, set[str], str]:
    """The exit code of ``python -m fairseq_sg.options``, the options that it lists, and its output."""
    result = run("fairseq_sg.options", *arguments)
    return result.code, set(re.findall(r"^  (--\S+)$", result.out, re.MULTILINE)), result.out + result.err


def test_the_options_command_lists_all():
    code, options, _ = listed()
    assert code == 0 and not plugin_options() - options and "--clip-norm" in options and not REFUSED & options


@pytest.mark.parametrize(
    "name,has,has_not",
    [
        ("linear", {"--feature-map", "--attention-bias"}, {"--attention-dropout", "--dropout", "--lr"}),
        ("copy_gate", {"--copy-gate-dropout", "--ffn-init"}, {"--topk-k"}),
        ("cross_entropy_orthogonality", {"--orthogonality-weight"}, {"--adam-betas"}),
        ("torch_adam", {"--adam-betas", "--weight-decay"}, {"--orthogonality-weight"}),
        ("sg_translation", {"--length-window", "--left-pad-source"}, {"--memory-length"}),
        ("sg_lstm_ctl", {"--hidden-dim"}, {"--encoder-layers"}),
    ],
)
def test_the_options_command_with_a_name(name, has, has_not):
    code, options, _ = listed(name)
    assert code == 0 and not has - options and not has_not & options


@pytest.mark.parametrize("name", ["qk_norm", "--qk-norm"])
def test_the_options_command_with_an_option(name):
    code, options, printed = listed(name)
    assert (
        code == 0
        and options == {"--qk-norm"}
        and "one of l1, l2, none, rms; default: none" in " ".join(printed.split())
    )


@pytest.mark.parametrize(
    "name,printed",
    [
        ("relu", "feature map relu, chosen by --feature-map: no options of its own\n"),
        ("separate", "depth separate, chosen by --depth (Vaswani et al. 2017): no options of its own\n"),
        ("exact_match", "scoring exact_match, chosen by --scoring: no options of its own\n"),
    ],
)
def test_the_options_command_with_a_name_that_has_none(name, printed):
    assert listed(name)[2] == printed


def test_the_options_command_with_a_name_that_has_only_shared_ones():
    """The first line says so. It does not for a mechanism with options of its own, or for an architecture."""
    code, options, printed = listed("switch")
    assert code == 0 and "--moe-k" in options and "--moe-selection" not in options
    chosen = "feedforward layer switch, chosen by --encoder-ffn, --decoder-ffn (Fedus et al. 2022; Csordás 2023, 7.3)"
    assert printed.splitlines()[0] == f"{chosen}: no options of its own; it shares these:"
    assert listed("sigma_moe")[2].splitlines()[0].endswith("--decoder-ffn (Csordás 2023, 7.4)")
    assert listed("sg_lstm_ctl")[2].splitlines()[0] == "model sg_lstm_ctl, chosen by --arch"


def test_the_options_command_names_the_roles_of_an_attention():
    roles = "--encoder-attention, --decoder-attention"
    assert listed("geometric")[2].startswith(f"attention geometric, chosen by {roles} (Csordás")
    assert listed("linear")[2].startswith(f"attention linear, chosen by {roles}, --cross-attention (")


def test_the_options_command_with_an_unknown_name():
    code, _, printed = listed("lineer")
    assert code == 2
    assert printed == "error: there is no option and no mechanism named 'lineer': did you mean linear?\n"
    assert listed("xyzzy")[2].endswith("; for one of your own, add --user-dir FOLDER\n")


def test_a_width_that_the_documentation_advises_against(caplog):
    from fairseq_sg.modules.attention import ATTENTION_REGISTRY
    from fairseq_sg.modules.attention.linear import _advise

    def warned(**options) -> list[str]:
        _advise.cache_clear()
        caplog.clear()
        for _ in range(2):
            ATTENTION_REGISTRY["linear"](64, 4, role="encoder", **options)
        return [record.getMessage() for record in caplog.records]

    (line,) = warned(feature_map="elu", feature_dim="sqrt")
    assert line.startswith("--feature-dim sqrt leaves --feature-map elu 4 features") and line.endswith(
        "rebased, taylor"
    )
    (line,) = warned(feature_map="rebased", feature_dim="3")
    assert line.endswith("--feature-map rebased should have 4 or more: give --feature-dim 4")
    assert not warned(feature_map="taylor", feature_dim="sqrt") and not warned(
        feature_map="rebased", feature_dim="sqrt"
    )
    assert not warned(feature_map="elu") and not warned(feature_map="elu", feature_dim="4")


def test_a_rotation_above_a_denominator_that_may_vanish(caplog):
    """A Query (1, 0) and a Key (0, 1) have no feature in common, and after rotations by 0 and 1 they have."""
    from fairseq_sg.modules.attention import linear
    from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
    from fairseq_sg.modules.position import RotaryPosition

    rotary = functools.partial(RotaryPosition, causal=False)

    def made(**options):
        linear._warn_of_large_outputs.cache_clear()
        caplog.clear()
        return linear.LinearAttention(2, 1, role="encoder", position=rotary, **options).eval()

    attention = made(feature_map="relu")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("--position rotary rotates the numerator alone, and with --feature-map relu")
    k, v = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]), torch.ones(1, 1, 2, 2)  # (B, H, N, E)
    q = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    out = attention._weighted_sum(attention._queries(q, None), attention._keys(k, None), v, None)
    assert out.abs().max() > 1e5
    attention.position = None
    assert not attention._weighted_sum(attention._queries(q, None), attention._keys(k, None), v, None).any()
    for name, options in (("cosformer", {"cosformer_horizon": 9}), ("dpfp", {}), ("t2r", {}), ("relu", {})):
        made(feature_map=name, feature_map_options=options)
        assert caplog.records and FEATURE_MAP_REGISTRY[name].may_vanish
        made(feature_map=name, feature_map_options=options, linear_attention_denominator="none")
        assert not caplog.records
    made(feature_map="elu")
    assert not caplog.records


def test_a_folder_for_checkpoints_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    message = f"--save-dir {tmp_path}/file/run cannot be made: Not a directory"
    assert_one_line(run("fairseq-train", *words("--save-dir", f"{tmp_path}/file/run")), message, 1)
