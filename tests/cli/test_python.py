"""``fairseq_sg.load`` on a model that fairseq-train has trained, against fairseq-generate."""

from __future__ import annotations

import pytest

import fairseq_sg
from helpers.commands import evaluation, succeed, translations


@pytest.mark.parametrize("beam", [1, 4])
def test_it_translates_and_scores_as_fairseq_generate(beam, trained, data):
    checkpoint = trained("relative").checkpoint
    more = ["--gen-subset", "gen", "--beam", beam, "--scoring", "exact_match", "--batch-size", 7]
    printed = succeed("fairseq-generate", *evaluation(data, checkpoint, *more))
    expected = translations(printed)
    model = fairseq_sg.load(checkpoint, device="cpu")
    sources = (data / "raw" / "gen.src").read_text().splitlines()
    found = model.translate(sources, beam=beam)
    assert found == [expected[number].hypothesis for number in range(len(sources))]
    right = sum(answer == expected[number].target for number, answer in enumerate(found))
    assert f"({right} of {len(sources)})" in printed and 0 < right < len(sources)
    # The exact match of the teacher-forced pass is that of the greedy search.
    assert beam > 1 or model.accuracy("gen") == 100 * right / len(sources)
