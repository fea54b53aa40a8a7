"""``--scoring exact_match``: percentages, what counts as equal, and its way through fairseq."""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

from fairseq import options, scoring
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hypothesis import given, settings
from hypothesis import strategies as st

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.scoring.exact_match import ExactMatchScorer


def scored(pairs) -> ExactMatchScorer:
    scorer = ExactMatchScorer(FairseqDataclass())
    for reference, hypothesis in pairs:
        scorer.add_string(reference, hypothesis)
    return scorer


@pytest.mark.parametrize(
    "reference,hypothesis,same",
    [
        ("WALK WALK", "WALK WALK", True),
        ("WALK WALK", "WALK", False),
        ("WALK", "WALK WALK", False),
        ("WALK RUN", "RUN WALK", False),
        ("WALK RUN", "WALKRUN", False),
        ("WALK", "walk", False),
        ("WALK RUN", " WALK   RUN ", True),
        ("", "", True),
        ("", "WALK", False),
        ("WALK", "", False),
        ("WALK", "WALK <pad>", False),
        ("<<unk>>", "<unk>", False),
    ],
)
def test_equal_means_every_token_in_order(reference, hypothesis, same):
    assert scored([(reference, hypothesis)]).score() == (100.0 if same else 0.0)


def test_percentage_and_result_string():
    scorer = scored([("A", "A"), ("A B", "A B"), ("A", "B")])
    assert scorer.score() == pytest.approx(200 / 3)
    assert scorer.result_string() == "exact_match = 66.6667 (2 of 3)"


def test_nothing_generated():
    assert scored([]).score() == 0.0 and scored([]).result_string() == "exact_match = 0.0000 (0 of 0)"


tokens = st.lists(st.sampled_from("abc"), max_size=3).map(" ".join)


@settings(derandomize=True)
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_counts_pairs_in_any_order(pairs, random):
    expected = 100 * sum(a == b for a, b in pairs) / len(pairs)
    assert scored(pairs).score() == pytest.approx(expected)
    random.shuffle(pairs)
    assert scored(pairs).score() == pytest.approx(expected)


def test_fairseq_builds_it_by_name():
    scorer = scoring.build_scorer("exact_match", Dictionary())
    assert isinstance(scorer, ExactMatchScorer)


@pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")
def test_fairseq_generate_builds_it_from_the_command_line(tmp_path):
    checkpoint = tmp_path / "model.pt"
    checkpoint.touch()
    parsed = options.parse_args_and_arch(
        options.get_generation_parser(),
        ["data", "--path", str(checkpoint), "--task", "translation", "--scoring", "exact_match"],
    )
    scorer = scoring.build_scorer(convert_namespace_to_omegaconf(parsed).scoring, Dictionary())
    assert isinstance(scorer, ExactMatchScorer)
    assert hasattr(scorer, "add_string")  # what makes fairseq hand over strings and not token ids
    scorer.add_string("A B", "A B")
    assert scorer.score() == 100.0
