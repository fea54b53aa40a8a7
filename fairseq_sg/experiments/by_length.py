"""BLEU by sentence length: translations of several systems, with paired bootstrap tests against a baseline.

Subwords are joined to words. sacreBLEU scores them (BLEU and chrF2, Post 2018) against raw/SUBSET.plain.tgt: every
subset, and the sentences of all subsets by the length of their source. Confidence intervals of 95 % and p-values are
those of sacreBLEU's paired bootstrap (Koehn 2004). Its seed is SACREBLEU_SEED in the environment, or 12345. See
docs/translation.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import figures
from fairseq_sg.experiments.plan import Plan, Trial
from fairseq_sg.experiments.records import saved
from fairseq_sg.experiments.report import Table, as_text, markdown_table
from fairseq_sg.experiments.results import Results
from fairseq_sg.files import read_manifest
from fairseq_sg.lengths import plain_lengths, unit_of
from fairseq_sg.scoring.plain_bleu import hypotheses_in_order, metrics, read_lines

# With fairseq, the root logger prints everything; these log every resampling and font.
for _name in ("sacrebleu", "matplotlib", "PIL"):
    logging.getLogger(_name).setLevel(logging.WARNING)

#: Resamples of a bootstrap: sacreBLEU's default.
SAMPLES = 1000
#: sacreBLEU's names, which include the defaults of chrF.
METRICS = ("BLEU", "chrF2")
Place = tuple[str, int]


@dataclass(frozen=True)
class Text:
    """The translated text.

    Attributes:
        references: subset -> plain target of every sentence.
        lengths: subset -> length of every source.
        unit: the unit of lengths.
        limit: the maximum length in training; 0 without a limit.
    """

    references: dict[str, list[str]]
    lengths: dict[str, list[int]]
    unit: str
    limit: int


@dataclass(frozen=True)
class System:
    """A model trained from a seed, with its output of ``fairseq-generate`` for every subset; in a recipe, ``name`` is
    that of its row.
    """

    name: str
    seed: int
    outputs: dict[str, Path]


@dataclass(frozen=True)
class Bucket:
    """Sentences whose source has ``low`` to ``high`` words (None: unlimited), by subset and line from 0."""

    low: int
    high: int | None
    places: list[Place]

    @property
    def label(self) -> str:
        return f"{self.low}–{self.high}" if self.high else f"{self.low}+"


@dataclass(frozen=True)
class Score:
    """A corpus score, the half-width of its 95 % confidence interval, and its p-value.

    The p-value is that of the difference from the baseline; None for the baseline itself, or without one.
    """

    score: float
    ci: float
    p: float | None


def read_text(folder: Path, subsets: Sequence[str]) -> Text:
    """Reads references and lengths. Raises UsageError for a folder without them."""
    manifest = read_manifest(folder)
    request, unit = manifest["request"], unit_of(manifest)
    references = {subset: read_lines(folder / "raw" / f"{subset}.plain.tgt") for subset in subsets}
    lengths = {subset: plain_lengths(folder, subset, "src", unit) for subset in subsets}
    for subset in subsets:
        if len(lengths[subset]) != len(references[subset]):
            raise UsageError(
                f"{folder}/raw/{subset}.plain.tgt: {len(references[subset]):,} lines, but {subset}.plain.src has "
                f"{len(lengths[subset]):,}: prepare the data again"
            )
    # With --train-all, the limit is that of subsets, not of training.
    limit = 0 if request.get("train_all") else request.get("max_length") or 0
    return Text(references, lengths, unit, limit)


def make_buckets(text: Text, bounds: Sequence[int]) -> list[Bucket]:
    """Sorts the sentences of all subsets into buckets by length: up to each bound, and beyond the last.

    The limit of training is always a bound. Empty buckets are omitted.
    """
    highs: list[int | None] = [*sorted({*bounds, *([text.limit] if text.limit else [])}), None]
    found = []
    for low, high in zip([1, *(h + 1 for h in highs if h)], highs, strict=True):
        places = [
            (subset, line)
            for subset, lengths in text.lengths.items()
            for line, length in enumerate(lengths)
            if low <= length and (high is None or length <= high)
        ]
        if places:
            found.append(Bucket(low, high, places))
    return found


def bootstrap(
    hypotheses: Sequence[str],
    references: Sequence[str],
    tokenize: str,
    baseline: Sequence[str] | None = None,
    samples: int = SAMPLES,
) -> tuple[dict[str, Score], dict[str, str]]:
    """Scores of a system with their intervals, against a baseline if given, and sacreBLEU's
    signatures; both by metric.
    """
    from sacrebleu.significance import PairedTest

    systems = [("baseline", list(baseline))] if baseline is not None else []
    test = PairedTest([*systems, ("system", list(hypotheses))], metrics(tokenize), [list(references)], "bs", samples)
    signatures, results = test()
    last = {metric: results[metric][-1] for metric in METRICS}
    scores = {metric: Score(float(r.score), float(r.ci), r.p_value) for metric, r in last.items()}
    return scores, {metric: str(signatures[metric]) for metric in METRICS}


def length_ratio(hypotheses: Sequence[str], references: Sequence[str], tokenize: str) -> float:
    """Words in the translations per word in the references, as BLEU counts them."""
    from sacrebleu.metrics import BLEU

    found = BLEU(tokenize=tokenize, force=True).corpus_score(list(hypotheses), [list(references)])
    return found.sys_len / max(1, found.ref_len)


def check_seed() -> None:
    """Raises UsageError for a seed with which sacreBLEU's bootstrap is not reproducible; 0 means no seed."""
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    if not seed.isascii() or not seed.isdecimal() or int(seed) == 0:
        raise UsageError(
            f"SACREBLEU_SEED is {seed!r} in the environment: set it to a whole number above 0, or unset it"
        )


def compare(
    text: Text,
    systems: Sequence[System],
    baseline: str,
    bounds: Sequence[int],
    tokenize: str,
    samples: int = SAMPLES,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Scores of all systems on every subset and in every bucket.

    A system is tested against the baseline of the same seed. Buckets have intervals but no p-values: the smallest have
    too few sentences for a test. ``earlier`` is a comparison from another time or place: its systems are kept, and its
    translations of the baseline are used for seeds without one here.

    Raises:
        UsageError: a missing or incomplete output, one with other references, an invalid seed, or an earlier comparison
            of other text.
    """
    check_seed()
    now: dict[str, Any] = {
        "baseline": baseline,
        "references": hashlib.sha256(json.dumps(text.references).encode()).hexdigest(),
    }
    if earlier:
        # The translations of the earlier baseline are of its references.
        check_same(earlier, now, "references")
    baselines = dict(earlier["baselines"]) if earlier else {}
    translations = {
        (system.name, system.seed): {
            subset: hypotheses_in_order(system.outputs[subset], references)
            for subset, references in text.references.items()
        }
        for system in systems
    }
    if len(translations) < len(systems):
        raise UsageError("two systems have the same name and seed: give them different names")
    baselines |= {str(seed): lines for (name, seed), lines in translations.items() if name == baseline}
    buckets = make_buckets(text, bounds)
    signatures: dict[str, str] = {}
    found = []
    for system in systems:
        other = baselines.get(str(system.seed)) if system.name != baseline else None
        mine = translations[system.name, system.seed]
        scores, signatures = _scores(text, buckets, mine, other or {}, tokenize, samples)
        outputs = {subset: str(path) for subset, path in system.outputs.items()}
        found.append({"name": system.name, "seed": system.seed, "outputs": outputs, **scores})
    now |= {
        "unit": text.unit,
        "limit": text.limit,
        "samples": samples,
        "signatures": signatures,
        "subsets": {subset: len(references) for subset, references in text.references.items()},
        "buckets": [{"low": b.low, "high": b.high, "label": b.label, "sentences": len(b.places)} for b in buckets],
        "systems": found,
        "baselines": baselines,
    }
    return united(earlier, now) if earlier else now


def _scores(
    text: Text,
    buckets: Sequence[Bucket],
    mine: dict[str, list[str]],
    other: dict[str, list[str]],
    tokenize: str,
    samples: int,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The entries of a system by subset and by bucket, and sacreBLEU's signatures.

    Args:
        mine: subset -> translations. other: those of the baseline that they are tested against; {} for none.
    """
    by_subset, by_bucket, signatures = {}, [], {}
    for subset, references in text.references.items():
        scores, signatures = bootstrap(mine[subset], references, tokenize, other[subset] if other else None, samples)
        by_subset[subset] = _entry(scores, mine[subset], references, tokenize)
    for bucket in buckets:
        hypotheses = [mine[subset][line] for subset, line in bucket.places]
        references = [text.references[subset][line] for subset, line in bucket.places]
        scores, _ = bootstrap(hypotheses, references, tokenize, samples=samples)
        by_bucket.append(_entry(scores, hypotheses, references, tokenize))
    return {"subsets": by_subset, "buckets": by_bucket}, signatures


def check_same(earlier: dict[str, Any], now: dict[str, Any], *keys: str) -> None:
    """Raises UsageError for an earlier comparison in which one of ``keys`` differs."""
    for key in keys:
        if earlier[key] != now[key]:
            raise UsageError(f"the earlier results have other {key} of BLEU by length: choose another --results")


def united(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """``now`` with the systems that only an earlier comparison has.

    Where the baseline of a seed was translated again, p-values from before are None: they were against another one.

    Raises:
        UsageError: the earlier comparison was scored in another way.
    """
    check_same(earlier, now, "baseline", "limit", "buckets", "signatures", "samples")
    there = {(system["name"], system["seed"]) for system in now["systems"]}
    kept = [system for system in earlier["systems"] if (system["name"], system["seed"]) not in there]
    for system in kept:
        seed = str(system["seed"])
        if now["baselines"].get(seed) != earlier["baselines"].get(seed):
            for entry in system["subsets"].values():
                for metric in METRICS:
                    entry[metric]["p"] = None
    first = [system for system in kept + now["systems"] if system["name"] == now["baseline"]]
    others = [system for system in kept + now["systems"] if system["name"] != now["baseline"]]
    return now | {"systems": first + others}


def _entry(scores: dict[str, Score], hypotheses: list[str], references: list[str], tokenize: str) -> dict[str, Any]:
    found: dict[str, Any] = {metric: asdict(score) for metric, score in scores.items()}
    return found | {"length_ratio": length_ratio(hypotheses, references, tokenize)}


def _label(comparison: dict[str, Any], name: str) -> str:
    """The label of a system in tables."""
    return comparison.get("labels", {}).get(name, name)


def with_interval(entry: dict[str, float]) -> str:
    return f"{entry['score']:.1f} ± {entry['ci']:.1f}"


def p_value(entry: dict[str, Any], samples: int) -> str:
    """Formats a p-value with three digits, bounded below by the resolution of the resamples."""
    p = entry["p"]
    return "–" if p is None else f"< {1 / samples:.3g}" if p < 1 / samples else f"{p:.3f}"


def subset_table(comparison: dict[str, Any]) -> Table:
    """Rows of text with a header: every system on every subset."""
    rows = [["subset", "model", "seed", "BLEU", "p", "chrF2", "p", "length"]]
    for subset in comparison["subsets"]:
        for system in comparison["systems"]:
            entry = system["subsets"][subset]
            tested = [
                cell
                for metric in METRICS
                for cell in (with_interval(entry[metric]), p_value(entry[metric], comparison["samples"]))
            ]
            name = _label(comparison, system["name"])
            rows.append([subset, name, str(system["seed"]), *tested, f"{entry['length_ratio']:.2f}"])
    return rows


def bucket_table(comparison: dict[str, Any]) -> Table:
    """Rows of text with a header: BLEU of every system by the length of the source, and the length of its output."""
    buckets = comparison["buckets"]
    rows = [["model", "seed", *(bucket["label"] for bucket in buckets)]]
    for system in comparison["systems"]:
        cells = [f"{with_interval(entry['BLEU'])} ({entry['length_ratio']:.2f})" for entry in system["buckets"]]
        rows.append([_label(comparison, system["name"]), str(system["seed"]), *cells])
    return [*rows, ["sentences", "", *(str(bucket["sentences"]) for bucket in buckets)]]


def page(title: str, comparisons: dict[str, dict[str, Any]], picture: str) -> str:
    """The page of the scores; where the trainings come from is on the page of the results."""
    lines = [f"# {title}: BLEU by length", "", f"![BLEU by length]({picture})", ""]
    for name, comparison in comparisons.items():
        limit, unit = comparison["limit"], comparison["unit"]
        trained = f"sources of at most {limit} {unit}" if limit else "sources of all lengths"
        sizes = ", ".join(f"`{subset}` {number:,}" for subset, number in comparison["subsets"].items())
        lines += [
            f"## {name}: trained on {trained}",
            "",
            *markdown_table(subset_table(comparison)),
            "",
            f"BLEU by the {unit} of the source, {' and '.join(f'`{s}`' for s in comparison['subsets'])} together:",
            "",
            *markdown_table(bucket_table(comparison)),
            "",
            f"- Sentences: {sizes}.",
            "- Scores ± half the width of the 95 % confidence interval.",
            f"- p: of the difference from `{_label(comparison, comparison['baseline'])}` of the same seed, by a paired "
            f"bootstrap of {comparison['samples']:,} resamples, not corrected for the number of comparisons. "
            "sacreBLEU's p-value is nearly one-sided: without a true difference, 11 to 12 % of tests have p < 0.05.",
            "- length, and in parentheses: words of the translations for each word of the references.",
            *(f"- {metric}: `{signature}`" for metric, signature in comparison["signatures"].items()),
            "",
        ]
    return "\n".join(lines)


def figure_of(comparisons: dict[str, dict[str, Any]]) -> Any:
    """Scores by length: a row for each dataset, a column for each metric; lengths of training are shaded.

    Shows the mean over seeds with the range from minimum to maximum, or the confidence interval of a single seed.
    """
    figure, panels = figures.grid(len(comparisons), 2)
    for row, (name, comparison) in zip(panels, comparisons.items(), strict=True):
        for axes, metric in zip(row, METRICS, strict=True):
            draw(axes, comparison, metric)
            axes.set_title(name)
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def draw(axes: Any, comparison: dict[str, Any], metric: str) -> None:
    buckets, limit = comparison["buckets"], comparison["limit"]
    inside = sum(bool(bucket["high"]) and bucket["high"] <= limit for bucket in buckets)
    if inside:
        axes.axvspan(-0.5, inside - 0.5, color="0.9", label="lengths of training")
    models = list(dict.fromkeys(system["name"] for system in comparison["systems"]))
    for number, model in enumerate(models):
        seeds = [[e[metric] for e in system["buckets"]] for system in comparison["systems"] if system["name"] == model]
        means, below, above = [], [], []
        for entries in zip(*seeds, strict=True):
            scores = [e["score"] for e in entries]
            means.append(statistics.mean(scores))
            below.append(means[-1] - min(scores) if len(scores) > 1 else min(entries[0]["ci"], means[-1]))
            above.append(max(scores) - means[-1] if len(scores) > 1 else entries[0]["ci"])
        # Side by side, so that lines of different models do not overlap.
        places = [x + 0.08 * (number - (len(models) - 1) / 2) for x in range(len(buckets))]
        colour, label = figures.COLOURS[number % len(figures.COLOURS)], _label(comparison, model)
        axes.errorbar(places, means, [below, above], marker="o", ms=3, lw=1, elinewidth=0.8, label=label, color=colour)
    axes.set(
        xlabel=f"{comparison['unit']} of the source (below: sentences)",
        ylabel=metric,
        xticks=range(len(buckets)),
        xticklabels=[f"{bucket['label']}\n{bucket['sentences']}" for bucket in buckets],
        xlim=(-0.5, len(buckets) - 0.5),
    )
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)


def score(
    plan: Plan, trials: Sequence[Trial], results: Results, earlier: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """The comparison on every dataset, of the finished runs and of an earlier score; None before any.

    Args:
        results: of the plan's own folders, which have the translations.

    Raises:
        UsageError: translations are missing or come from other data.
    """
    recipe, how = plan.recipe, plan.recipe.by_length
    found = {data: without_diverged(one, results, data) for data, one in (earlier or {}).items()}
    found = {data: one for data, one in found.items() if one["systems"]}
    for data in plan.used():
        subsets = recipe.by_length_of(data)
        finished = {
            (record["row"], record["seed"])
            for record in results.records
            if record["data"] == data and record.get("result", {}).get("generated")
        }
        systems = [
            System(trial.row, trial.run.seed, {subset: trial.run.decoded_log(subset) for subset in subsets})
            for trial in trials
            if trial.data == data and (trial.row, trial.run.seed) in finished and "failed" not in saved(trial.run)
        ]
        if subsets and systems:
            text = read_text(plan.data / recipe.data[data].folder, subsets)
            scored = compare(text, systems, how.baseline, how.bounds, how.tokenize, earlier=found.get(data))
            rows = [how.baseline, *recipe.rows]
            there = [one for one in scored["systems"] if one["name"] in rows]
            there.sort(key=lambda one: (rows.index(one["name"]), one["seed"]))
            labels = {name: row.label for name, row in recipe.rows.items()}
            found[data] = scored | {"systems": there, "labels": labels}
    return found or None


def without_diverged(comparison: dict[str, Any], results: Results, data: str) -> dict[str, Any]:
    """A comparison without the systems of trainings that were repeated and have diverged."""
    gone = {(r["row"], r["seed"]) for r in results.records if r["data"] == data and "diverged" in r}
    return comparison | {"systems": [one for one in comparison["systems"] if (one["name"], one["seed"]) not in gone]}


def as_tables(comparisons: dict[str, dict[str, Any]]) -> str:
    """The tables as text."""
    return "\n\n".join(
        f"BLEU by length, {name}\n\n{as_text(subset_table(comparison))}\n\n{as_text(bucket_table(comparison))}"
        for name, comparison in comparisons.items()
    )
